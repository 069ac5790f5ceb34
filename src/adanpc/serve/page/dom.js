// Elements of the page, made by functions: texts are never read as HTML.

/** An element with attributes, listeners (`onclick`) and children; children that are null or false are left out. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) {
      made.addEventListener(name.slice(2), value);
    } else if (name === "class") {
      made.className = value;
    } else if (typeof value === "boolean") {
      made.toggleAttribute(name, value);
    } else if (value !== null && value !== undefined) {
      made.setAttribute(name, value);
    }
  }
  made.append(...shown(children));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for a drawing. */
export function drawing(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    made.setAttribute(name, value);
  }
  made.append(...shown(children));
  return made;
}

function shown(children) {
  return children.flat().filter((child) => child !== null && child !== undefined && child !== false);
}

/** Puts these children in the place of all that an element had. */
export function fill(parent, ...children) {
  parent.replaceChildren(...shown(children));
}

const listsWithArrows = new WeakSet();

/**
 * Lets the arrow keys move among the items of a list, so that Tab passes the list in one step.
 *
 * An item is what `selector` finds; with `focusable`, the controls in it are reached by Tab while the item is the current
 * one. To be called again when the items are others.
 */
export function moveByArrows(list, selector, focusable = null) {
  const items = () => [...list.querySelectorAll(selector)];
  const targets = (item) => (focusable ? [...item.querySelectorAll(focusable)] : [item]);

  function makeCurrent(current) {
    for (const item of items()) {
      for (const target of targets(item)) {
        target.tabIndex = item === current ? 0 : -1;
      }
    }
  }

  function move(event) {
    const all = items();
    const place = all.indexOf(event.target.closest(selector));
    const next = nextPlace(event.key, place, all.length);
    if (place < 0 || next === null) return;
    event.preventDefault();
    // The same control of the next item: from one checkbox to another, from one picture to another.
    const column = Math.max(0, targets(all[place]).indexOf(event.target));
    const there = targets(all[next]);
    there[Math.min(column, there.length - 1)].focus();
  }

  if (!listsWithArrows.has(list)) {
    listsWithArrows.add(list);
    list.addEventListener("keydown", move);
    list.addEventListener("focusin", (event) => {
      const item = event.target.closest(selector);
      if (item) makeCurrent(item);
    });
  }
  const all = items();
  const focused = all.find((item) => item.contains(document.activeElement));
  const chosen = all.find((item) => item.getAttribute("aria-current") === "true");
  makeCurrent(focused ?? chosen ?? all[0]);
}

function nextPlace(key, place, count) {
  if (key === "ArrowDown" || key === "ArrowRight") return Math.min(place + 1, count - 1);
  if (key === "ArrowUp" || key === "ArrowLeft") return Math.max(place - 1, 0);
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  return null;
}

/** Shows an error as one sentence in the place where it happened. */
export function showError(place, error) {
  place.textContent = error.message;
  place.hidden = false;
}

let notices = 0;

/** Tells something in passing, with an action if there is one; it goes away by itself, or when the action is done. */
export function notify(text, action = null) {
  const area = document.getElementById("notices");
  const note = element("div", { class: "notice", id: `notice-${++notices}` }, element("p", {}, text));
  const remove = () => note.remove();
  if (action) {
    const act = element("button", { type: "button", class: "quiet", onclick: () => { remove(); action.run(); } }, action.name);
    note.append(act);
  }
  note.append(element("button", { type: "button", class: "quiet close", "aria-label": "Dismiss", onclick: remove }, "×"));
  area.append(note);
  while (area.children.length > MOST_NOTICES) area.firstChild.remove();
  setTimeout(remove, NOTICE_MILLISECONDS);
}

const MOST_NOTICES = 3;
const NOTICE_MILLISECONDS = 12_000;

/** A dialog that closes by Escape, by its cancel buttons, and by a click beside it. */
export function open(dialog) {
  if (!dialog.dataset.ready) {
    dialog.dataset.ready = "true";
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest(".cancel")) dialog.close();
    });
  }
  if (!dialog.open) dialog.showModal();
}

/** Calls a function once after a burst of calls: at once, and then at most every so many milliseconds. */
export function atMostEvery(milliseconds, run) {
  let waiting = false;
  let again = false;
  async function turn() {
    waiting = true;
    again = false;
    await run();
    setTimeout(() => {
      waiting = false;
      if (again) turn();
    }, milliseconds);
  }
  return () => {
    if (waiting) again = true;
    else turn();
  };
}
