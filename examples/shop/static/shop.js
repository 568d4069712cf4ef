// The page: a basket, the troubles, and what goes on behind. How it pays is in client.js.

import { AnotherAccount, intend, logIn, login, send, unsettled } from "./client.js";

const SHOWN = ["Idempotent-Replayed", "Retry-After", "Location"];
const LOOK_EVERY = 150; // milliseconds
const FIELDS = ["status", "generation", "owner", "response_status"];

const form = document.querySelector("form");
const element = (id) => document.getElementById(id);

const KILLED =
  "It had charged the card and stored no response. Its lease runs out. Your browser may repeat the broken request itself.";

const NOT_SEEN = { name: null, away: false, row: null, gateway: [] };
let behind = NOT_SEEN; // as last seen, since the last payment began
let payment = null; // the last one that was begun in this tab
let paying = 0;
let ended = 0; // requests that have ended
let counted = 0; // how many of them had ended when the gateway was looked at last

// --- payments ---------------------------------------------------------------------------------------------------

const payments = new Map(); // by key: what this tab did for each

/** What this tab knows of a payment; its requests are a group of their own on the wire. */
function paymentOf(intent) {
  const known = payments.get(intent.key);
  if (known) return known;
  const made = { ...intent, what: describe(intent), requests: 0, killed: 0, away: false, lost: 0, other: null, shown: addGroup(intent) };
  payments.set(intent.key, made);
  return made;
}

/** How often Pay was pressed for this payment, also before a reload, and in the tab that this one is a copy of. */
function presses(key) {
  return Number(sessionStorage.getItem(`presses ${key}`) ?? 0);
}

function press(key) {
  sessionStorage.setItem(`presses ${key}`, presses(key) + 1);
}

// --- paying -----------------------------------------------------------------------------------------------------

/** Each trouble pays for the intent in its own way, and returns the answers. All but the first need time to happen. */
const TROUBLES = {
  none: async (intent) => [await send(intent, onTheWire)],

  "double-click": (intent) => {
    press(intent.key); // the second one
    return Promise.all([send(intent, onTheWire), send(intend({}), onTheWire)]);
  },

  "answer-lost": async (intent) => [await send(intent, losingTheFirstAnswer())],

  "two-tabs": (intent) => {
    payment.other = "a second tab sends it, too";
    window.open(location.href); // it gets a copy of this tab's sessionStorage, and so of the intent
    return Promise.all([send(intent, onTheWire)]);
  },

  "changed-amount": async (intent) => {
    const first = await send(intent, onTheWire);
    const changed = { ...JSON.parse(intent.body), amount: total() + 1000 };
    return [first, await send({ ...intent, body: JSON.stringify(changed) }, onTheWire)];
  },

  "server-killed": async (intent) => {
    await seen(() => behind !== NOT_SEEN);
    const asked = ownRequests().length;
    // A browser may send a POST again by itself when a kept connection breaks: then the first answer below is a 409.
    const sent = send(intent, onTheWire);
    await seen(() => ownRequests().length > asked);
    const { process } = ownRequests().at(-1);
    await tellServer("/behind/kill-worker", { process });
    payment.killed++;
    note("killed", `worker ${process} was killed`, KILLED);
    tell("paying", `Worker ${process} was killed in mid-charge. The client sends the same request again…`);
    return [await sent];
  },

  "redis-away": async (intent) => {
    await tellServer("/behind/redis-away", {});
    payment.away = true;
    note("away", "Redis hangs", "Connections stay open, and nothing is answered. The shop refuses: nothing runs.");
    tell("paying", "Redis hangs. The shop answers 503 and runs nothing; the client sends the same request again…");
    return [await send(intent, onTheWire)];
  },

  "another-login": async (intent) => {
    const other = intent.account === "alice" ? "bob" : "alice";
    payment.other = `then ${other} logged in`;
    return [await send(intent, losingTheFirstAnswer(() => changeLogin(other)))];
  },
};

const SLOW = ["double-click", "two-tabs", "server-killed"]; // their card is charged at once, and answered late

async function pay() {
  const trouble = new FormData(form).get("trouble");
  const card = SLOW.includes(trouble) ? "tok_slow" : element("card").value;
  let intent;
  try {
    intent = intend({ card, amount: total() });
  } catch (error) {
    return tellOfAnotherAccount(error);
  }
  press(intent.key);
  await settle(intent, TROUBLES[trouble]);
}

function tellOfAnotherAccount(error) {
  if (!(error instanceof AnotherAccount)) throw error;
  tell("refused", `${error.message} For ${login().account} nothing was sent.`);
}

/** Show that it is being paid, and then how that ended. */
async function settle(intent, send) {
  if (intent.key !== payment?.key) behind = NOT_SEEN;
  payment = paymentOf(intent);
  paying++;
  tell("paying", "Paying…");
  show();
  let answers;
  try {
    answers = await send(intent);
  } catch (error) {
    return tellOfAnotherAccount(error);
  } finally {
    paying--;
  }
  if (paying) return; // another click is still at it
  const answer = answers.at(-1);
  if (!answer) tell("unknown", "Not known yet whether it was paid. Press Pay: it is sent again, not paid again.");
  else if (answer.status === 201) {
    const { id, charge, amount } = answer.body;
    tell("paid", `Paid ${money(amount)}: order ${id}, charge ${charge}.`);
  } else tell("refused", `Refused: ${answer.status} ${answer.body.error ?? ""}. ${answer.body.message ?? ""}`);
}

/** A fetch whose first answer is lost: its connection is closed once the server has stored it. Others come through. */
function losingTheFirstAnswer(andThen = () => {}) {
  let lost = false;
  return async (url, options) => {
    if (lost) return onTheWire(url, options);
    lost = true;
    const connection = new AbortController();
    seen(() => behind.row?.status === "completed").then(() => {
      andThen();
      connection.abort();
    });
    const headers = { ...options.headers, "X-Trouble": "hold-answer" };
    return onTheWire(url, { ...options, headers, signal: connection.signal });
  };
}

async function tellServer(url, body) {
  try {
    await fetch(url, { method: "POST", headers: headers(), body: JSON.stringify(body) });
  } catch {
    // the worker that was to be killed was the one that we told
  }
}

function headers() {
  return { Authorization: `Bearer ${login().token}`, "Content-Type": "application/json" };
}

// --- the wire ---------------------------------------------------------------------------------------------------

/** fetch, written down: the newest request is at the top, within its payment. */
async function onTheWire(url, options) {
  const key = options.headers["Idempotency-Key"];
  const its = payments.get(key);
  its.requests++;
  const number = its.requests;
  const lines = [`${options.method} ${url}`, `Idempotency-Key: ${key}`, options.body];
  const entry = add(its, "exchange", "pending", `request ${number}`, "waiting for the answer");
  const sent = make("details", make("summary", "the request"), make("pre", lines.join("\n")));
  const answered = make("pre", "…");
  entry.append(sent, answered);
  try {
    const answer = await fetch(url, options);
    const kept = SHOWN.filter((name) => answer.headers.has(name)).map((name) => `${name}: ${answer.headers.get(name)}`);
    const body = await answer.clone().text();
    answered.textContent = [`${answer.status} ${answer.statusText}`, ...kept, body.trim()].join("\n");
    mark(entry, answer.status, ...meaning(answer, body));
    return answer;
  } catch (error) {
    its.lost++;
    answered.textContent = "no answer: the connection was lost";
    mark(entry, "lost", "lost", "no answer");
    throw error;
  } finally {
    ended++;
    showSummary();
  }
}

/** The kind of an answer, and what it says of the work. Each kind has its own colour and words. */
function meaning(answer, body) {
  const { status } = answer;
  if (answer.headers.get("Idempotent-Replayed") === "true") return ["replayed", `${status} replayed: nothing ran`];
  if (body.includes("idempotency_key_in_progress")) return ["busy", `${status} still running: ask again`];
  if (body.includes("idempotency_key_retry")) return ["busy", `${status} another retry was first: ask again`];
  if (body.includes("idempotency_key_reused")) return ["refused", `${status} refused: another request had this key`];
  if (status === 503) return ["away", `${status} nothing ran: ask again`];
  if (status < 300) return ["done", `${status} done, and stored`];
  return ["refused", status < 500 ? `${status} declined, and stored` : `${status} an error`];
}

/** Something that happened to the server meanwhile. */
function note(kind, what, why) {
  const entry = add(payment, "event", kind, "", what);
  entry.dataset.status = kind;
  entry.append(make("p", why));
  showSummary();
}

function add(its, kind, verdict, number, text) {
  const entry = make("li");
  entry.className = kind;
  const badge = make("strong", text);
  badge.className = "badge";
  entry.append(make("p", badge, make("span", number)));
  entry.dataset.verdict = verdict;
  its.shown.querySelector("ol").prepend(entry);
  its.shown.hidden = false;
  element("no-wire").hidden = true;
  return entry;
}

function mark(entry, status, verdict, text) {
  entry.dataset.status = status;
  entry.dataset.verdict = verdict;
  entry.querySelector(".badge").textContent = text;
}

/** A group for the requests of one payment, above those of the payments before. */
function addGroup(intent) {
  const group = make("details", make("summary", describe(intent)), make("p", `key ${intent.key}`), make("ol"));
  for (const before of element("wire").children) before.open = false; // they are still there, folded
  group.open = true;
  group.hidden = true;
  element("wire").prepend(group);
  return group;
}

function describe({ account, body }) {
  const { card, amount } = JSON.parse(body);
  return `${account} pays ${money(amount ?? 0)} with ${card ?? "no card"}`;
}

/** Forget what was on the wire; of a payment that is under way, what comes next is shown again. */
function clear() {
  for (const its of payments.values()) {
    its.shown.querySelector("ol").replaceChildren();
    its.shown.hidden = true;
  }
  element("no-wire").hidden = false;
}

function make(name, ...content) {
  const made = document.createElement(name);
  made.append(...content);
  return made;
}

// --- looking behind -------------------------------------------------------------------------------------------------

const waiting = new Set();

/** Wait until what was seen behind is so. */
function seen(isSo) {
  return new Promise((resolve) => waiting.add({ isSo, resolve }));
}

async function look() {
  const key = payment?.key;
  const before = ended;
  try {
    const token = { Authorization: `Bearer ${login().token}` };
    const answer = await fetch(`/behind/?key=${encodeURIComponent(key ?? "none")}`, { headers: token });
    const found = await answer.json();
    if (key === payment?.key && found.gateway) {
      const row = found.away ? behind.row : found.row; // the one of this payment that was last seen, if any
      // For another login, the server looks at a row of that account: keep what was seen of this payment.
      if (isOwn()) behind = { ...found, row };
      else behind = { ...behind, gateway: found.gateway.map((asked, i) => ({ ...asked, own: behind.gateway[i]?.own })) };
      counted = before;
    }
  } catch {
    // the worker that was asked was killed: ask the next one
  }
  show();
  for (const one of waiting) {
    if (one.isSo()) {
      waiting.delete(one);
      one.resolve();
    }
  }
  setTimeout(look, LOOK_EVERY);
}

/** Whether the payment on the page is of the account that is logged in. */
function isOwn() {
  return !payment || payment.account === login().account;
}

function ownRequests() {
  return behind.gateway.filter((asked) => asked.own);
}

/** Show the row of the last payment, and nothing of the one before it. */
function show() {
  const { name, away, row, gateway } = behind;
  element("away").hidden = !away;
  const seenBefore = row ? "This is the row as last seen." : "This payment’s row was not seen yet.";
  element("away").textContent = `Redis does not answer. ${seenBefore}`;
  const looking = isOwn() ? `looking for key ${payment?.key}…` : `the row is ${payment.account}’s`;
  element("row").textContent = payment ? (name ?? looking) : "no payment yet";
  for (const field of FIELDS) element(field).textContent = row?.[field] || "–";
  const counts = row?.lease_ms != null && !away;
  element("lease").textContent = counts ? `${(row.lease_ms / 1000).toFixed(1)} s` : row && away ? "not known" : "–";
  element("lease-bar").hidden = !counts;
  if (counts) element("lease-bar").value = row.lease_full_ms ? row.lease_ms / row.lease_full_ms : 0;
  element("fence").textContent = row ? `(${row.generation}, ${row.owner || "nobody"})` : "–";
  element("fenced").textContent =
    row?.generation > 1 ? `what generation ${row.generation - 1} still writes is refused` : "a late attempt is refused";
  if (behind === NOT_SEEN) return;
  element("charged").textContent = gateway.filter((asked) => asked.charged).length;
  const own = ownRequests();
  element("no-gateway").hidden = own.length > 0;
  const items = own.map(({ process, charged }) => {
    const item = make("li", `from process ${process}: ${charged ? "charged" : "known key, not charged again"}`);
    item.dataset.charged = charged;
    return item;
  });
  element("gateway").replaceChildren(...items);
  showSummary();
}

/** The one line that matters: what was done to this payment, and how often the card was charged. */
function showSummary() {
  if (!payment) return;
  const pressed = presses(payment.key);
  const times = ["pressed in another tab", "pressed once", "pressed twice"][pressed] ?? `pressed ${pressed} times`;
  const parts = [times, count(payment.requests, "request")];
  if (payment.lost && !payment.killed) parts.push(`${count(payment.lost, "answer")} lost`);
  if (payment.killed) parts.push(`${count(payment.killed, "worker")} killed`);
  if (payment.away) parts.push("Redis away");
  if (payment.other) parts.push(payment.other);
  const charges = ownRequests().filter((asked) => asked.charged).length;
  const known = counted >= ended && (isOwn() || behind.name);
  element("summary").textContent = `${parts.join(", ")} → ${known ? count(charges, "charge") : "…"}`;
  element("summary").hidden = false;
  payment.shown.querySelector("summary").textContent = `${payment.what}: ${count(payment.requests, "request")}`;
}

function count(number, what) {
  return `${number} ${what}${number === 1 ? "" : "s"}`;
}

// --- the rest of the page -----------------------------------------------------------------------------------------

function total() {
  return [...form.querySelectorAll("[data-price]")].reduce((sum, item) => sum + item.dataset.price * item.value, 0);
}

function money(cents) {
  return (cents / 100).toFixed(2);
}

function showTotal() {
  element("total").textContent = money(total());
  element("pay").disabled = total() <= 0;
}

function tell(state, text) {
  const outcome = element("outcome");
  outcome.dataset.state = state;
  outcome.textContent = text;
}

function changeLogin(account) {
  logIn(account);
  const other = account === "alice" ? "bob" : "alice";
  element("account").textContent = account;
  element("log-in").textContent = `Log in as ${other}`;
  element("log-in").dataset.account = other;
}

form.addEventListener("submit", (event) => {
  event.preventDefault(); // and the button stays enabled: what a second click does is the client's business
  pay();
});
form.addEventListener("input", showTotal);
element("clear").addEventListener("click", clear);
element("log-in").addEventListener("click", (event) => changeLogin(event.target.dataset.account));
changeLogin(login().account);
showTotal();
look();

const left = unsettled(); // this tab was reloaded, or opened in mid-payment
if (left) settle(left, async (intent) => [await send(intent, onTheWire)]);
