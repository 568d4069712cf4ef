// How a page pays: the payment is named once, stored before it is sent, and sent again until its fate is known.
// Nothing here knows of the page; copy it.

const STORED = "payment"; // in sessionStorage: a reload finds it again, another tab has its own
const LOGIN = "account";
const URL = "/charges";
const TOKENS = { alice: "alice-token", bob: "bob-token" }; // fake: yours come from your login

const ONE_TRY = 30_000; // milliseconds until a request without an answer counts as lost
const ALL_TRIES = 90_000;
const LONGEST_PAUSE = 8_000;

/** Thrown where a payment was begun for another account: a key belongs to its account, so both would be charged. */
export class AnotherAccount extends Error {
  constructor({ account }) {
    super(`This payment was begun by ${account}. Log in as ${account} to finish it.`);
    this.account = account;
  }
}

/** The account that is logged in, and its token. */
export function login() {
  const account = sessionStorage.getItem(LOGIN) ?? "alice";
  return { account, token: TOKENS[account] };
}

/** Log in as another account. A payment that is not settled stays with the account that began it. */
export function logIn(account) {
  sessionStorage.setItem(LOGIN, account);
}

/** The payment that was begun and not yet settled, or null. */
export function unsettled() {
  return JSON.parse(sessionStorage.getItem(STORED));
}

/** Begin a payment, or go on with the one that is not settled: a second click is not a second payment. */
export function intend(body) {
  const before = unsettled();
  if (before) return checked(before);
  // The account is kept with the key: after another login, the same key would be another payment.
  // The body is kept as text: a retry must be the same to the byte.
  const intent = { account: login().account, key: crypto.randomUUID(), body: JSON.stringify(body) };
  sessionStorage.setItem(STORED, JSON.stringify(intent));
  return intent;
}

/** Send a payment until there is an answer that counts. Null: still not known; it stays stored, to be sent again. */
export async function send(intent, fetch = window.fetch.bind(window)) {
  const until = Date.now() + ALL_TRIES;
  for (let tries = 1; ; tries++) {
    checked(intent); // before each try: the login may have changed since the last one
    const answer = await sendOnce(intent, fetch);
    if (answer && !mayBeSentAgain(answer)) {
      settle(intent);
      return answer;
    }
    const pause = pauseAfter(answer, tries);
    if (Date.now() + pause > until) return null;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

function checked(intent) {
  if (intent.account !== login().account) throw new AnotherAccount(intent);
  return intent;
}

/** The answer, or null where none came: then nobody here knows whether the card was charged. */
async function sendOnce(intent, fetch) {
  try {
    const answer = await fetch(URL, {
      method: "POST",
      headers: {
        Authorization: `Bearer ${TOKENS[intent.account]}`,
        "Content-Type": "application/json",
        "Idempotency-Key": intent.key, // the same on every try
      },
      body: intent.body,
      signal: AbortSignal.timeout(ONE_TRY),
    });
    const text = await answer.text(); // the connection may break in the middle of it
    return { status: answer.status, headers: answer.headers, body: asJSON(text) };
  } catch {
    return null;
  }
}

/** Whether the same request may get another answer later. What was stored, or refused for good, never does. */
function mayBeSentAgain({ status, headers, body }) {
  if (headers.get("Idempotent-Replayed") === "true") return false;
  if (status === 409) return ["idempotency_key_in_progress", "idempotency_key_retry"].includes(body.error);
  if (status === 500) return !String(body.error).startsWith("idempotency_");
  return [408, 425, 429, 502, 503, 504].includes(status);
}

/** Milliseconds: longer with each try, never shorter than the server asks for, and never the same for two clients. */
function pauseAfter(answer, tries) {
  const longest = Math.min(LONGEST_PAUSE, 250 * 2 ** tries);
  const asked = 1000 * Number(answer?.headers.get("Retry-After") ?? 0) || 0;
  return asked + (asked ? 250 : longest) * (0.5 + Math.random() / 2);
}

/** The next payment gets a key of its own. */
function settle(intent) {
  if (unsettled()?.key === intent.key) sessionStorage.removeItem(STORED);
}

function asJSON(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}
