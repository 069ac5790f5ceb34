// What every view needs to know: the bank as it was last heard of, and what happens after a change.

import * as api from "./api.js";
import { setClasses } from "./classes.js";
import { notify } from "./dom.js";

const ROLES_THAT_CHANGE = ["expert", "admin"];

let known = null;
const watchers = new Set();

/** Asks for the state of the bank and tells everyone who watches it. */
export async function refreshBank() {
  known = await api.bank();
  setClasses(known.classes);
  for (const watch of watchers) watch(known);
  return known;
}

export function watchBank(watch) {
  watchers.add(watch);
}

export function bank() {
  return known;
}

/** Whether this user may veto, relabel and roll back. */
export function mayChange() {
  return ROLES_THAT_CHANGE.includes(known.role);
}

/** Tells that a change was made, and offers to take it back. */
export function announce(text, position) {
  notify(text, { name: "Undo", run: () => takeBack(position) });
}

/** Takes one change back. */
export async function takeBack(position) {
  try {
    await api.undo(position, `Undo of the change at position ${position}`);
    notify(`The change at position ${position} was taken back.`);
  } catch (error) {
    notify(error.message);
  }
}

const WITHOUT_REASON = "Say why in a few words, so that others can follow.";

/** The reason in a form; throws a sentence if there is none. */
export function reasonIn(form) {
  const field = form.elements.why;
  const why = field.value.trim();
  field.setAttribute("aria-invalid", String(!why));
  if (why) return why;
  field.focus();
  throw new Error(WITHOUT_REASON);
}
