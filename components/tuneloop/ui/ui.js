// Looks every three seconds whether a run has committed more, and shows the new page in place of the old one.
const main = document.querySelector("main[data-run]");
let mark = null;

async function look() {
  const ended = await refresh().catch(() => false); // a server that is away is asked again
  if (!ended) setTimeout(look, 3000);
}

async function refresh() {
  const answer = await (await fetch(`${location.pathname}/mark`)).json();
  if (mark !== null && answer.mark !== mark) {
    const page = await (await fetch(location.href)).text();
    const next = new DOMParser().parseFromString(page, "text/html").querySelector("main[data-run]");
    const open = main.querySelector("details[open]") !== null;
    main.replaceChildren(...next.childNodes);
    main.querySelectorAll("details").forEach((details) => (details.open = open));
  }
  mark = answer.mark;
  return !answer.running;
}

if (main) look();
