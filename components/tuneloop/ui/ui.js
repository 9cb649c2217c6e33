// Looks every three seconds whether a run has committed more, and shows the new page in place of the old one.
const main = document.querySelector("main[data-run]");
let mark = null;

async function look() {
  const answer = await fetch(`${location.pathname}/mark`).then((response) => response.json()).catch(() => null);
  if (answer && mark !== null && answer.mark !== mark) {
    const page = await fetch(location.href).then((response) => response.text());
    const next = new DOMParser().parseFromString(page, "text/html").querySelector("main[data-run]");
    const open = main.querySelector("details[open]") !== null;
    main.replaceChildren(...next.childNodes);
    main.querySelectorAll("details").forEach((details) => (details.open = open));
  }
  if (answer) mark = answer.mark;
  if (!answer || answer.running) setTimeout(look, 3000);
}

if (main) look();
