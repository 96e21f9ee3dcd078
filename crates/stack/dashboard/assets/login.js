// The form of the login.

import { h } from "./dom.js";
import { login } from "./api.js";
import { errorBox } from "./errors.js";

export function loginPage(why, enter) {
  const wrong = h("div", { id: "login-error" }, why && errorBox(why, "Session"));
  const submit = h("button", { type: "submit", class: "first" }, "Log in");
  async function send(event) {
    event.preventDefault();
    const form = event.target;
    submit.disabled = true;
    try {
      await login(form.account.value, form.password.value);
      await enter();
    } catch (error) {
      wrong.replaceChildren(errorBox(error, `Login as "${form.account.value}"`));
      form.password.value = "";
      form.password.focus();
    }
    submit.disabled = false;
  }
  return h("main", { class: "login", id: "main" }, h("form", { class: "card", onsubmit: send },
    h("span", { class: "brand" }, h("img", { src: "icon.svg", alt: "" }), "Tapio"), h("h1", {}, "Log in"),
    h("label", {}, "Account", h("input", { name: "account", required: true, autocomplete: "username", autocapitalize: "none", spellcheck: "false" })),
    h("label", {}, "Password", h("input", { name: "password", type: "password", required: true, autocomplete: "current-password" })),
    wrong, submit, h("p", { class: "small soft" }, "Accounts are those of the API: 'tapiod user add', or the accounts of the host by PAM.")));
}
