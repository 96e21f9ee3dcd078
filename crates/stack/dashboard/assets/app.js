// The frame: login, navigation, and which view an address shows.

import { h, morph } from "./dom.js";
import { hasSession, logout, methods, whenSessionEnds, whoAmI } from "./api.js";
import * as store from "./store.js";
import * as figures from "./figures.js";
import { me } from "./roles.js";
import { loginPage } from "./login.js";
import { overview } from "./view-overview.js";
import { sr, storage } from "./view-storage.js";
import { vdi } from "./view-vdi.js";
import { vm, vms } from "./view-vms.js";
import { performance } from "./view-performance.js";
import { task, tasks } from "./view-tasks.js";
import { forgetHistory } from "./history.js";
import { consoleView } from "./view-console.js";
import { settleConsole } from "./console.js";
import { findings, forgetFindings, hasFindings } from "./view-findings.js";

const app = document.getElementById("app");
const VIEWS = { "": overview, storage, sr, vdi, vms, vm, performance, tasks, task, findings, console: consoleView };
const UUIDS = ["sr", "vdi", "vm", "task", "console"];
const SECTIONS = [["", "Overview"], ["storage", "Storage", "sr", "vdi"], ["vms", "VMs", "vm", "console"], ["performance", "Performance"], ["tasks", "Tasks", "task"]];
let drawn = null, asked = false;

const where = () => location.hash.replace(/^#\/?/, "").split("/");

function navigation(place) {
  const sections = hasFindings() ? [...SECTIONS, ["findings", "Findings"]] : SECTIONS;
  const busy = store.all("task").filter((task) => task.status === "pending").length;
  return h("nav", { class: "nav", "aria-label": "Sections" }, h("ul", {}, sections.map(([name, title, ...below]) => h("li", {},
    h("a", { href: `#/${name}`, "aria-current": [name, ...below].includes(place) && "page" }, title,
      name === "tasks" && busy > 0 && h("span", { class: "badge" }, String(busy), h("span", { class: "hidden" }, " running")))))));
}

function frame() {
  const [place, uuid] = where();
  const view = VIEWS[place] ?? overview;
  const shown = store.link.live === null ? { title: "Loading", body: [h("p", { class: "soft" }, "Reading the objects of the pool …")] } : UUIDS.includes(place) ? view(uuid, redraw) : view(redraw);
  document.title = `${shown.title} · Tapio`;
  const live = { true: ["good", "live"], false: ["bad", "connection lost"], null: ["", "connecting"] }[store.link.live];
  return h("div", { class: "frame" },
    h("header", { class: "head" }, h("a", { class: "brand", href: "#/" }, h("img", { src: "icon.svg", alt: "" }), "Tapio"),
      h("span", { class: `badge ${live[0]}`, role: "status" }, live[1]),
      h("div", { class: "who" }, h("span", { class: "soft" }, `${me.name} (${me.role})`), h("button", { type: "button", onclick: leave }, "Log out"))),
    navigation(VIEWS[place] ? place : ""),
    h("main", { class: "main", id: "main", tabindex: -1, "data-key": `${place}/${uuid ?? ""}` },
      h("div", { class: "title" }, h("div", {}, h("h1", {}, shown.title), shown.about && h("p", { class: "soft" }, shown.about)),
        shown.actions && h("div", { class: "actions", role: "group", "aria-label": "Actions" }, shown.actions)), shown.body));
}

function draw() {
  asked = false;
  if (!drawn) return;
  const fresh = frame();
  if (drawn.isConnected) morph(drawn, fresh);
  else app.replaceChildren(drawn = fresh);
  settleConsole();
}

/** Draws soon, once for many changes. */
function redraw() {
  if (asked) return;
  asked = true;
  setTimeout(draw, 100);
}

function ask(why) {
  drawn = null;
  forgetFindings();
  forgetHistory();
  store.stop();
  figures.stop();
  document.title = "Log in · Tapio";
  app.replaceChildren(loginPage(why, enter));
  settleConsole();
  app.querySelector("input").focus();
}

async function leave() {
  store.stop();
  await logout();
  ask();
}

async function enter() {
  Object.assign(me, await whoAmI(), { methods: await methods() });
  drawn = h("div", {});
  draw();
  store.listen();
  figures.start(redraw);
}

store.onChange(redraw);
whenSessionEnds(ask);
addEventListener("hashchange", () => { draw(); document.getElementById("main")?.focus(); scrollTo(0, 0); });
document.getElementById("skip").addEventListener("click", (event) => { event.preventDefault(); document.getElementById("main").focus(); });
if (hasSession()) enter().catch(ask);
else ask();
