// All that the page asks of the server, and the one kind of error that comes back.

const TOKEN = "adanpc-token";
const NAME = "adanpc-name";
const LONGEST_PAUSE = 15_000; // milliseconds between two attempts to hear of changes again

/** A refusal of the server, or no answer at all, in one sentence. */
export class ServerError extends Error {
  constructor(message, code, status) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

let askForToken = async () => {};
let askedForToken = null;

/** Sets what is done when the server asks for a token: a function whose promise is kept when there is one. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

export function setToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

export function forgetToken() {
  sessionStorage.removeItem(TOKEN);
}

export function hasToken() {
  return sessionStorage.getItem(TOKEN) !== null;
}

export function ownName() {
  return localStorage.getItem(NAME) ?? "";
}

export function setOwnName(name) {
  localStorage.setItem(NAME, name);
}

function headers(more = {}) {
  const all = { ...more };
  const token = sessionStorage.getItem(TOKEN);
  if (token) all.Authorization = `Bearer ${token}`;
  const name = ownName();
  if (name) all["X-Expert"] = encodeURIComponent(name); // headers hold no other letters than Latin ones
  return all;
}

/** The response to a request; asks for a token, once for all requests that wait, if the server does. */
async function request(path, options = {}) {
  const sent = sessionStorage.getItem(TOKEN);
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers(options.headers) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer; is it still running?", "no-answer", 0);
  }
  if (response.ok) return response;
  const refusal = await refusalOf(response);
  if (response.status !== 401) throw refusal;
  if (sent === sessionStorage.getItem(TOKEN)) {
    askedForToken ??= askForToken(sent === null ? "" : refusal.message);
    await askedForToken;
    askedForToken = null;
  }
  return request(path, options);
}

async function refusalOf(response) {
  try {
    const document = await response.json();
    return new ServerError(sentence(document.error), document.code, response.status);
  } catch {
    return new ServerError(`The server answered with the status ${response.status}.`, "status", response.status);
  }
}

/** Messages of the library begin with a small letter and have no full stop. */
function sentence(text) {
  const start = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.?!]$/.test(start) ? start : `${start}.`;
}

async function get(path, options = {}) {
  const response = await request(path, options);
  return response.json();
}

async function post(path, document, options = {}) {
  const response = await request(path, {
    ...options,
    method: "POST",
    body: JSON.stringify(document),
    headers: { "Content-Type": "application/json" },
  });
  return response.json();
}

export const bank = () => get("/v1/bank");
export const queries = (order, limit) => get(`/v1/queries?order=${order}&limit=${limit}`);
export const query = (id) => get(`/v1/queries/${encodeURIComponent(id)}`);
export const preview = (id, without, options) => post("/v1/preview", { query: id, without }, options);
export const row = (id) => get(`/v1/rows/${id}`);
export const veto = (rows, why) => post("/v1/veto", { rows, why });
export const restore = (rows, why) => post("/v1/restore", { rows, why });
export const relabel = (rows, label, why) => post("/v1/relabel", { rows, label, why });
export const undo = (position, why) => post("/v1/undo", { position, why });
export const previewRollback = (to) => post("/v1/rollback", { to, preview: true });
export const rollback = (to, why) => post("/v1/rollback", { to, why });
export const ask = () => get("/v1/ask");
export const feedback = (id, label, why) => post("/v1/feedback", { query: id, label, why });
export const timeline = (points) => get(`/v1/timeline?points=${points}`);

/** The newest entries of the log, or those before a position; all of them, or what people did. */
export function log({ before = null, limit = 100, kind = "all" } = {}) {
  const wanted = new URLSearchParams({ limit, kind });
  if (before !== null) wanted.set("before", before);
  return get(`/v1/log?${wanted}`);
}

/** The answer to an image file. */
export async function predict(file, adapt) {
  const type = file.type || "application/octet-stream";
  const response = await request(`/v1/predict?adapt=${adapt}`, {
    method: "POST",
    body: file,
    headers: { "Content-Type": type },
  });
  return response.json();
}

/** The bytes of the map. */
export async function map(limit) {
  const response = await request(`/v1/map?limit=${limit}`);
  return response.arrayBuffer();
}

/** An address that an image element can load: a picture behind a token is fetched first. */
export async function pictureAddress(path) {
  if (!hasToken()) return path;
  const response = await request(path);
  return URL.createObjectURL(await response.blob());
}

/**
 * Calls `hear(kind, data)` for every event of the server, and `connected(boolean)` when the connection comes or goes.
 *
 * EventSource cannot send a token, so the stream is read by fetch.
 */
export async function listen(hear, connected) {
  let pause = 1000;
  for (;;) {
    try {
      const response = await request("/v1/events", { headers: { Accept: "text/event-stream" } });
      connected(true);
      pause = 1000;
      await readEvents(response.body, hear);
    } catch (error) {
      if (!(error instanceof ServerError) && !(error instanceof TypeError)) throw error;
    }
    connected(false);
    await new Promise((resume) => setTimeout(resume, pause));
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function readEvents(body, hear) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value.replaceAll("\r", "");
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) hearBlock(block, hear);
  }
}

function hearBlock(block, hear) {
  let kind = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    if (line.startsWith("data:")) data.push(line.slice(5).trim());
  }
  if (data.length) hear(kind, JSON.parse(data.join("\n")));
}
