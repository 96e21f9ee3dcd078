// A console in a page: its connection, and what is said when it ends. At most one is open.

import { h } from "./dom.js";
import { consoleTicket } from "./api.js";
import { errorBox } from "./errors.js";
import { byUuid, get } from "./store.js";
import { Screen } from "./screen.js";
import { Terminal } from "./terminal.js";

let open = null;

/** Where a view wants the console `uuid`; the console itself outlives redraws. */
export const consolePlace = (uuid) => h("div", { class: "console", "data-key": `console-${uuid}`, "data-live": uuid });

/** Opens the console that the page has a place for, and ends one that has lost its place. */
export function settleConsole() {
  const place = document.querySelector("[data-live]");
  if (open?.place === place) return;
  open?.end();
  open = place && new Console(place, place.dataset.live);
}

export const secureAttention = () => { open?.shown?.secureAttention?.(); open?.shown?.focus(); };
export const fullScreen = () => open?.place.requestFullscreen().then(() => open?.shown?.focus());

class Console {
  constructor(place, uuid) {
    this.place = place;
    this.uuid = uuid;
    this.hasEnded = false;
    const record = byUuid("console", uuid);
    this.isScreen = record.protocol === "rfb";
    this.title = `VM "${get("VM", record.VM)?.name_label ?? "?"}"`;
    this.status = h("div", { class: "console-status", role: "status" });
    this.help = h("p", { class: "small soft", id: "console-help" }, "Control and ] (the key beside P on many keyboards) leaves the console for the button below it; the guest gets all other keys.");
    this.out = h("button", { type: "button", onclick: () => document.querySelector("main h1").scrollIntoView() }, "To the top of the page");
    this.begin();
  }

  async begin() {
    this.say("Connecting …");
    const send = (bytes) => { if (this.socket?.readyState === WebSocket.OPEN) this.socket.send(bytes); };
    const leave = () => (document.exitFullscreen && document.fullscreenElement ? document.exitFullscreen() : Promise.resolve()).then(() => this.out.focus());
    const shown = this.shown = new (this.isScreen ? Screen : Terminal)(this.title, send, leave);
    this.place.replaceChildren(shown.node, this.status, this.help, this.out);
    try {
      const ticket = await consoleTicket(this.uuid);
      if (this.hasEnded) return;
      const socket = this.socket = new WebSocket(`${location.protocol === "https:" ? "wss" : "ws"}://${location.host}/console`, ["binary", `ticket.${ticket}`]);
      socket.binaryType = "arraybuffer";
      socket.addEventListener("message", ({ data }) => shown.push(new Uint8Array(data)));
      socket.addEventListener("close", () => shown.end());
      socket.addEventListener("open", () => { this.say("Connected"); shown.focus(); });
      await shown.run();
      this.lost();
    } catch (error) {
      this.socket?.close();
      shown.end();
      if (error.code) this.lost(error);
      else this.lost(null, error.message);
    }
  }

  say(...words) { this.status.replaceChildren(...words); }

  lost(error, why) {
    if (this.hasEnded) return;
    this.place.classList.add("over");
    const again = h("button", { type: "button", onclick: () => { this.place.classList.remove("over"); this.begin(); } }, "Connect again");
    const cause = why && why !== "the other end has gone" ? `: ${why}` : "";
    this.say(error ? errorBox(error, `Console of ${this.title}`) : h("p", {}, `The connection to the console has ended${cause}. The VM was shut down, or the session may not use it any more.`), again);
  }

  end() {
    this.hasEnded = true;
    this.socket?.close();
    this.shown?.end();
  }
}
