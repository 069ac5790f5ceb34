// How classes look: a color and a shape each, so that nobody has to tell them apart by color alone.

import { drawing, element } from "./dom.js";

// Eight colors that the color-blind can tell apart, after Okabe and Ito; page.css has them for light and dark.
export const COLORS = 8;

// Shapes in a square of 16, as paths of SVG and of canvas alike. Ten shapes and eight colors.
export const SHAPES = [
  "M8 1.500A6.500 6.500 0 1 1 7.990 1.500Z",
  "M2.500 2.500H13.500V13.500H2.500Z",
  "M8 1.500L15 14H1Z",
  "M8 .500L15.500 8L8 15.500L.500 8Z",
  "M8 .500L10.200 5.600L15.700 6.100L11.500 9.700L12.800 15.200L8 12.300L3.200 15.200L4.500 9.700L.300 6.100L5.800 5.600Z",
  "M5.500 1H10.500V5.500H15V10.500H10.500V15H5.500V10.500H1V5.500H5.500Z",
  "M1 2H15L8 14.500Z",
  "M4.500 1.500H11.500L15 8L11.500 14.500H4.500L1 8Z",
  "M3.500 .800L8 5.300L12.500 .800L15.200 3.500L10.700 8L15.200 12.500L12.500 15.200L8 10.700L3.500 15.200L.800 12.500L5.300 8L.800 3.500Z",
  "M8 1A7 7 0 0 1 15 8H8V15A7 7 0 0 1 8 1Z",
];

/** How many classes look different: the pairs of color and shape repeat after these. */
export const LOOKS = 40;

let names = [];

/** Remembers the names of the classes, in their order. */
export function setClasses(given) {
  names = given;
}

export function classNames() {
  return names;
}

export function nameOf(label) {
  return names[label] ?? `class ${label}`;
}

/** The name of the style-sheet variable that holds the color of a class. */
export function colorVariable(label) {
  return `--class-${label % COLORS}`;
}

export function shapeOf(label) {
  return SHAPES[label % SHAPES.length];
}

/** The mark of a class: its shape in its color. */
export function mark(label) {
  const path = drawing("path", { d: shapeOf(label) });
  return drawing("svg", { class: `mark class-${label % COLORS}`, viewBox: "0 0 16 16", "aria-hidden": "true" }, path);
}

/** The mark and the name of a class. */
export function tag(label) {
  return element("span", { class: "class-tag" }, mark(label), nameOf(label));
}

/** A list to choose a class from. */
export function classSelect(id, chosen) {
  const options = names.map((name, label) => element("option", { value: label, selected: label === chosen }, name));
  return element("select", { id, name: "label" }, options);
}

/** A list of classes for which there are too many to have a button each; calls `choose(label)`, with null for none. */
export function otherClass(labels, choose) {
  const options = labels.map((label) => element("option", { value: label }, nameOf(label)));
  const select = element("select", { "aria-label": "Another class" }, element("option", { value: "" }, "Another class…"), options);
  select.addEventListener("change", () => choose(select.value === "" ? null : Number(select.value)));
  return select;
}
