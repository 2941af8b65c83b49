// The ranking screen by keyboard, and drafts. Without this file the form works as it stands.

const form = document.getElementById("ranking");
const cards = [...form.querySelectorAll("[data-card]")];
const say = form.dataset;
const submit = form.querySelector("[data-submit]");
const order = form.querySelector("[data-order]");
const state = form.querySelector("[data-state]");
const live = form.querySelector("[data-live]");
const strength = form.querySelector(".strength");
const reason = form.querySelector("[name=reason]");
const singleKeys = form.querySelector("[data-single-keys]");
const ratings = [...form.querySelectorAll(".attributes select")];

const letter = (card) => card.dataset.card;
const rankOf = (card) => Number(card.querySelector(".ranks :checked")?.value ?? 0);
const radio = (card, rank) => card.querySelector(`.ranks [value="${rank || ""}"]`);
const fill = (text, values) => text.replace(/\{(\w+)\}/g, (_, name) => values[name]);
const announce = (text) => { live.textContent = text; };

// ---- what is ranked

function tiedWith(card) {
  const rank = rankOf(card);
  return rank ? cards.filter((other) => other !== card && rankOf(other) === rank) : [];
}

function missing() {
  const unranked = cards.filter((card) => !rankOf(card));
  return say.allowUnranked && unranked.length < cards.length ? [] : unranked;
}

function show() {
  const ranks = [...new Set(cards.map(rankOf).filter(Boolean))].sort((a, b) => a - b);
  order.textContent = ranks.map((rank) => cards.filter((card) => rankOf(card) === rank).map(letter).join(" = ")).join(" > ");
  for (const card of cards) {
    card.querySelector(".tied")?.remove();
    if (tiedWith(card).length) {
      const mark = Object.assign(document.createElement("span"), { className: "tied", textContent: say.sayTied });
      card.querySelector("h3").append(mark);
    }
  }
  if (strength) {
    strength.disabled = missing().length > 0 || ranks.length < 2;
    if (strength.disabled) strength.querySelector('[value=""]').checked = true;
  }
  const text = wanting();
  submit.disabled = sent || Boolean(text);
  state.classList.remove("bad");
  state.textContent = text || say.sayComplete;
}

function wanting() {
  const left = missing();
  if (left.length) return fill(say.sayMissing, { cards: left.map(letter).join(" ") });
  const unrated = ratings.find((choice) => !choice.value);
  if (unrated) return fill(say.sayRating, { name: unrated.dataset.name, card: letter(unrated.closest("[data-card]")) });
  return say.reasonRequired && !reason.value.trim() ? say.sayReason : "";
}

function rank(card, digit) {
  if (digit > cards.length) return;
  radio(card, digit).checked = true;
  changed(card);
}

function changed(card) {
  show();
  if (card) {
    const others = tiedWith(card).map(letter).join(", ");
    const text = !rankOf(card) ? say.sayNone : others ? say.sayTie : say.sayRank;
    announce(fill(text, { card: letter(card), rank: rankOf(card), others }) + (submit.disabled ? "" : `. ${say.sayComplete}`));
  }
  keepDraft();
}

// ---- keys

const here = () => cards.indexOf(document.activeElement.closest?.("[data-card]"));

function goTo(index) {
  const card = cards[index];
  if (!card) return;
  card.focus({ preventScroll: true });
  card.scrollIntoView({ block: "nearest" });
}

function isTyping(element) {
  return element.matches("textarea, select, input:not([type=radio], [type=checkbox])");
}

// who speaks to the computer, or hits keys by accident, can turn them off
singleKeys.checked = localStorage.getItem("single-keys") !== "off";
singleKeys.closest("label").hidden = false;
singleKeys.addEventListener("change", (event) => {
  localStorage.setItem("single-keys", singleKeys.checked ? "on" : "off");
  event.stopPropagation();
});

document.addEventListener("keydown", (event) => {
  const element = document.activeElement;
  // the keys belong to what is ranked, not to the page's menus
  if (element.closest("header.site, .skip")) return;
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    if (submit.disabled) announce(wanting());
    else form.requestSubmit(submit);
    return;
  }
  if (!singleKeys.checked || event.ctrlKey || event.metaKey || event.altKey || isTyping(element)) return;
  const key = event.key.toLowerCase();
  const now = here();
  if (/^[0-9]$/.test(key) && now >= 0) rank(cards[now], Number(key));
  else if (key === "n") goTo(Math.min(now + 1, cards.length - 1));
  else if (key === "p") goTo(now < 0 ? cards.length - 1 : Math.max(now - 1, 0));
  else if (/^[a-i]$/.test(key)) goTo(cards.findIndex((card) => letter(card).toLowerCase() === key));
  else return;
  event.preventDefault();
});

form.addEventListener("change", (event) => {
  const ranks = event.target.closest(".ranks");
  changed(ranks && ranks.closest("[data-card]"));
});
form.addEventListener("input", (event) => {
  if (event.target === reason) changed();
});

// ---- drafts: half a second after the last change, and when the page is left

let timer = 0;
let busy = false;
let sent = false;

function keepDraft() {
  clearTimeout(timer);
  if (say.draft && !sent) timer = setTimeout(sendDraft, 500);
}

async function sendDraft() {
  // one at a time, so that an older draft cannot arrive after a newer one
  if (busy && document.visibilityState !== "hidden") return keepDraft();
  timer = 0;
  busy = true;
  let kept = false;
  try {
    const answer = await fetch(say.draft, { method: "POST", body: new URLSearchParams(new FormData(form)), keepalive: true, redirect: "error" });
    kept = answer.status === 204;
  } catch { /* no connection, or a redirect to the sign-in page: said below */ }
  busy = false;
  if (sent || timer) return;
  state.classList.toggle("bad", !kept);
  state.textContent = kept ? [wanting(), say.saySaved].filter(Boolean).join(" · ") : say.sayUnsaved;
}

document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "hidden" && timer) {
    clearTimeout(timer);
    sendDraft();
  }
});

form.addEventListener("submit", (event) => {
  if (sent) return event.preventDefault();
  sent = true;
  clearTimeout(timer);
  submit.textContent = say.saySending;
  // a disabled button would take the focus away before the form is sent
  setTimeout(() => { submit.disabled = true; });
});

// the browser's copy of the page after "back": ask the server what is true now
window.addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

// ---- long answers fold

for (const card of cards) {
  const text = card.querySelector(".answer");
  const content = document.createRange();
  content.selectNodeContents(text);
  if (content.getBoundingClientRect().height < 380) continue;
  const button = Object.assign(document.createElement("button"), { type: "button", className: "quiet fold", textContent: say.sayFold });
  button.setAttribute("aria-expanded", "true");
  button.addEventListener("click", () => {
    const folded = text.classList.toggle("folded");
    button.textContent = folded ? say.sayUnfold : say.sayFold;
    button.setAttribute("aria-expanded", String(!folded));
    if (folded) card.scrollIntoView({ block: "nearest" });
  });
  text.after(button);
}

show();
document.querySelector("[data-start]").focus({ preventScroll: true });
