// The page: a basket, the troubles, and what goes on behind. How it pays is in client.js.

import { intend, send, unsettled } from "./client.js";

const HEADERS = { Authorization: "Bearer alice-token", "Content-Type": "application/json" };
const SHOWN = ["Idempotent-Replayed", "Retry-After", "Location"];
const LOOK_EVERY = 150; // milliseconds

const form = document.querySelector("form");
const element = (id) => document.getElementById(id);

const NOT_SEEN = { away: false, row: null, gateway: [] };
let behind = NOT_SEEN; // as last seen, since the last payment began
let lastKey = null;
let paying = 0;

// --- paying -----------------------------------------------------------------------------------------------------

/** Each trouble pays for the intent in its own way, and returns the answers. All but the first need time to happen. */
const TROUBLES = {
  none: async (intent) => [await send(intent, onTheWire)],

  "double-click": (intent) => Promise.all([send(intent, onTheWire), send(intend({}), onTheWire)]),

  "answer-lost": async (intent) => [await send(intent, losingTheFirstAnswer())],

  "two-tabs": (intent) => {
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
    const asked = behind.gateway.length;
    // A browser may send a POST again by itself when a kept connection breaks: then the first answer below is a 409.
    const sent = send(intent, onTheWire);
    await seen(() => behind.gateway.length > asked);
    await tellServer("/behind/kill-worker", { process: behind.gateway.at(-1).process });
    return [await sent];
  },

  "redis-away": async (intent) => {
    await tellServer("/behind/redis-away", {});
    return [await send(intent, onTheWire)];
  },
};

const SLOW = ["double-click", "two-tabs", "server-killed"]; // their card is charged at once, and answered late

async function pay() {
  const trouble = new FormData(form).get("trouble");
  const card = SLOW.includes(trouble) ? "tok_slow" : element("card").value;
  await settle(intend({ card, amount: total() }), TROUBLES[trouble]);
}

/** Show that it is being paid, and then how that ended. */
async function settle(intent, send) {
  if (intent.key !== lastKey) behind = NOT_SEEN;
  lastKey = intent.key;
  paying++;
  tell("paying", "Paying…");
  const answers = await send(intent);
  if (--paying) return; // another click is still at it
  const answer = answers.at(-1);
  if (!answer) tell("unknown", "Not known yet whether it was paid. Press Pay: it is sent again, not paid again.");
  else if (answer.status === 201) {
    const { id, charge, amount } = answer.body;
    tell("paid", `Paid ${money(amount)}: order ${id}, charge ${charge}.`);
  } else tell("refused", `Refused: ${answer.status} ${answer.body.error ?? ""}. ${answer.body.message ?? ""}`);
}

/** A fetch whose first answer is lost: its connection is closed once the server has stored it. Others come through. */
function losingTheFirstAnswer() {
  let lost = false;
  return async (url, options) => {
    if (lost) return onTheWire(url, options);
    lost = true;
    const connection = new AbortController();
    seen(() => behind.row?.status === "completed").then(() => connection.abort());
    const headers = { ...options.headers, "X-Trouble": "hold-answer" };
    return onTheWire(url, { ...options, headers, signal: connection.signal });
  };
}

/** fetch, written down. */
async function onTheWire(url, options) {
  const lines = [`${options.method} ${url}`, `Idempotency-Key: ${options.headers["Idempotency-Key"]}`, options.body];
  const entry = element("wire").appendChild(document.createElement("li"));
  const request = entry.appendChild(document.createElement("pre"));
  request.textContent = lines.join("\n");
  const shown = entry.appendChild(document.createElement("pre"));
  shown.textContent = "…";
  try {
    const answer = await fetch(url, options);
    const kept = SHOWN.filter((name) => answer.headers.has(name)).map((name) => `${name}: ${answer.headers.get(name)}`);
    const body = await answer.clone().text();
    shown.textContent = [`${answer.status} ${answer.statusText}`, ...kept, body.trim()].join("\n");
    entry.dataset.status = answer.status;
    return answer;
  } catch (error) {
    shown.textContent = "no answer: the connection was lost";
    entry.dataset.status = "lost";
    throw error;
  }
}

async function tellServer(url, body) {
  try {
    await fetch(url, { method: "POST", headers: HEADERS, body: JSON.stringify(body) });
  } catch {
    // the worker that was to be killed was the one that we told
  }
}

// --- looking behind -------------------------------------------------------------------------------------------------

const waiting = new Set();

/** Wait until what was seen behind is so. */
function seen(isSo) {
  return new Promise((resolve) => waiting.add({ isSo, resolve }));
}

async function look() {
  const key = lastKey;
  try {
    const answer = await fetch(`/behind/?key=${encodeURIComponent(key ?? "none")}`, { headers: HEADERS });
    const found = await answer.json();
    if (key === lastKey && found.gateway) behind = found;
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

function show() {
  if (behind === NOT_SEEN) return;
  const { away, row, gateway } = behind;
  element("away").hidden = !away;
  if (!away) {
    element("row").textContent = row?.name ?? "no row yet";
    for (const field of ["status", "generation", "owner", "response_status"]) {
      element(field).textContent = row?.[field] ?? "–";
    }
    element("lease").textContent = row?.lease_ms == null ? "–" : `${(row.lease_ms / 1000).toFixed(1)} s`;
  }
  element("charged").textContent = gateway.filter((asked) => asked.charged).length;
  element("gateway").start = Math.max(1, gateway.length - 7);
  const items = gateway.slice(-8).map(({ key, process, charged }) => {
    const item = document.createElement("li");
    const what = charged ? "charged" : "known key, not charged again";
    item.textContent = `key ${key.slice(0, 8)}…, from process ${process}: ${what}`;
    return item;
  });
  element("gateway").replaceChildren(...items);
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

form.addEventListener("submit", (event) => {
  event.preventDefault(); // and the button stays enabled: what a second click does is the client's business
  pay();
});
form.addEventListener("input", showTotal);
showTotal();
look();

const left = unsettled();
if (left) settle(left, async (intent) => [await send(intent, onTheWire)]); // this tab was reloaded, or opened in mid-payment
