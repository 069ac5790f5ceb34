// Pictures of rows and queries, and tiles where there is none.

import { pictureAddress } from "./api.js";
import { mark } from "./classes.js";
import { element } from "./dom.js";

/** The picture at a path of the server; without one, a tile with the mark of the class and a caption. */
export function picture(path, description, caption, label) {
  if (!path) return tile(description, caption, label);
  const frame = element("span", { class: "picture" });
  const image = element("img", { alt: description, loading: "lazy", decoding: "async" });
  image.addEventListener("error", () => frame.replaceWith(tile(description, caption, label)));
  frame.append(image);
  load(image, path, () => frame.replaceWith(tile(description, caption, label)));
  return frame;
}

async function load(image, path, giveUp) {
  try {
    image.src = await pictureAddress(path);
  } catch {
    giveUp(); // a picture that was forgotten is no error: the row is still there
  }
}

function tile(description, caption, label) {
  // Without a description the picture is decoration: what is beside it says the same.
  const named = description ? { role: "img", "aria-label": description } : { "aria-hidden": "true" };
  return element("span", { class: "picture tile", ...named }, mark(label), caption);
}
