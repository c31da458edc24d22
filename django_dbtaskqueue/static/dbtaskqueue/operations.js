/* The operations area: refreshing, ticking, keys, copying. Every page works without it. */
(function () {
    "use strict";
    const root = document.getElementById("dbtq");
    if (!root) return;
    const texts = JSON.parse(root.dataset.texts);
    const live = document.getElementById("dbtq-live");
    const note = document.getElementById("dbtq-note");
    const asOf = document.getElementById("dbtq-as-of");
    const whereRead = document.getElementById("dbtq-where-read");
    const help = document.getElementById("dbtq-help");
    const picker = document.getElementById("dbtq-interval");

    function fill(text, values) {
        return text.replace(/%\((\w+)\)s/g, (_, name) => values[name]);
    }

    function remember(name, value) {
        try {
            if (value === undefined) return window.localStorage.getItem("dbtq-" + name);
            window.localStorage.setItem("dbtq-" + name, value);
        } catch (refused) { /* storage switched off: nothing is remembered */ }
        return null;
    }

    root.querySelectorAll(".dbtq-script").forEach((part) => { part.hidden = false; });

    /* -- ages: the server writes them, here they go on counting ---------------------------------------------------- */

    /* As durations.py writes it: two units, without one that is zero. */
    function span(seconds) {
        const s = Math.max(Math.floor(seconds), 0), m = Math.floor(s / 60), h = Math.floor(s / 3600), d = Math.floor(s / 86400);
        const two = (first, second) => [first, second].filter((part) => parseInt(part, 10)).join("");
        if (d) return two(d + "d", h % 24 + "h");
        if (h) return two(h + "h", m % 60 + "m");
        return two(m + "m", s % 60 + "s") || "0s";
    }

    function showAges(now) {
        root.querySelectorAll("time.dbtq-ago").forEach((time) => {
            const seconds = (now - Date.parse(time.dateTime)) / 1000;
            const text = fill(seconds >= 0 ? texts.ago : texts.within, {time: span(Math.abs(seconds))});
            if (time.textContent !== text) time.textContent = text;
        });
    }

    /* -- refreshing ------------------------------------------------------------------------------------------------ */

    let etag = "", timer = 0, asking = false, stopped = false, waitUntil = 0;

    function interval() { return picker ? Number(picker.value) : 0; }
    function ticked() { return live ? live.querySelectorAll("input[name=_selected_action]:checked").length : 0; }

    function busy() {
        if (document.hidden || document.querySelector("dialog[open]")) return true;
        const active = document.activeElement;
        return Boolean(live && active && live.contains(active) && active.matches("input:not([type=checkbox]), select, textarea"));
    }

    function plan() {
        window.clearTimeout(timer);
        if (!stopped && live && interval()) timer = window.setTimeout(turn, interval() * 1000);
    }

    function turn() {
        if (live.querySelector("[data-look-on]")) { plan(); return; }
        if (ticked()) note.textContent = texts.held;
        else if (!busy() && !asking && Date.now() >= waitUntil) { refresh(); return; }
        plan();
    }

    function address() {
        const url = new URL(window.location.href);
        url.searchParams.set("_live", "1");
        url.hash = "";
        return url;
    }

    async function refresh() {
        asking = true;
        try {
            const answer = await fetch(address(), {headers: etag ? {"If-None-Match": etag} : {}, cache: "no-store"});
            await take(answer);
        } catch (unreachable) {
            note.textContent = fill(texts.lost, {time: asOf.textContent});
            note.classList.add("dbtq-warning");
        }
        asking = false;
        plan();
    }

    async function take(answer) {
        if (answer.redirected || answer.status === 401 || answer.status === 403) {
            stopped = true;
            note.textContent = texts.gone;
            note.classList.add("dbtq-warning");
            return;
        }
        waitUntil = Date.now() + Number(answer.headers.get("Retry-After") || 0) * 1000;
        if (!answer.ok && answer.status !== 304) throw new Error(String(answer.status));
        const time = answer.headers.get("X-As-Of");
        const where = answer.headers.get("X-Read-From");
        if (whereRead && where) whereRead.textContent = decodeURIComponent(where);
        if (answer.status === 200) {
            etag = answer.headers.get("ETag") || "";
            const text = await answer.text();
            if (ticked()) return;
            replace(text);
        }
        note.textContent = "";
        note.classList.remove("dbtq-warning");
        if (time) {
            asOf.dateTime = time;
            asOf.textContent = clockText(time);
            showAges(Date.parse(time));
        }
        root.dataset.refreshed = String(Number(root.dataset.refreshed || 0) + 1);
    }

    /* The wall clock of the server's zone, as the server wrote it. */
    function clockText(iso) {
        return iso.slice(11, 19);
    }

    function replace(html) {
        const active = document.activeElement;
        const focused = active && live.contains(active) ? active.id : "";
        const row = live.querySelector("tr.dbtq-here");
        const rows = row ? Array.from(row.parentNode.children).indexOf(row) : -1;
        const open = new Set(Array.from(live.querySelectorAll("details[open][id]"), (one) => one.id));
        const charts = new Map(Array.from(live.querySelectorAll(".dbtq-chart[id]"), (one) => [one.id, one]));
        const places = Array.from(live.querySelectorAll(".dbtq-scroll[id]"), (one) => [one.id, one.scrollLeft, one.scrollTop]);
        const fresh = document.createElement("template");
        fresh.innerHTML = html;
        fresh.content.querySelectorAll("details[id]").forEach((one) => { one.open = one.open || open.has(one.id); });
        fresh.content.querySelectorAll(".dbtq-chart[id]").forEach((one) => {
            if (charts.has(one.id)) one.replaceWith(charts.get(one.id));
        });
        live.replaceChildren(fresh.content);
        places.forEach(([id, left, top]) => { if (document.getElementById(id)) document.getElementById(id).scrollTo(left, top); });
        live.querySelectorAll(".dbtq-script").forEach((part) => { part.hidden = false; });
        if (focused && document.getElementById(focused)) document.getElementById(focused).focus({preventScroll: true});
        const body = live.querySelector("table.dbtq-table tbody");
        if (rows >= 0 && body && body.children[rows]) body.children[rows].classList.add("dbtq-here");
        document.dispatchEvent(new CustomEvent("dbtq:refreshed"));
    }

    const graph = document.getElementById("dbtq-graph");
    if (graph) graph.scrollLeft = (graph.scrollWidth - graph.clientWidth) / 2;

    if (live && picker) {
        const chosen = remember("interval");
        if (chosen !== null && Array.from(picker.options).some((one) => one.value === chosen)) picker.value = chosen;
        picker.addEventListener("change", () => { remember("interval", picker.value); plan(); });
        document.getElementById("dbtq-refresh").addEventListener("click", (event) => { event.preventDefault(); refresh(); });
        document.addEventListener("visibilitychange", () => { if (!document.hidden && interval()) turn(); });
        plan();
    }

    /* -- a search that goes on, until it has a match, has read everything, or is stopped ---------------------------- */

    let stopLooking = false;

    function lookOn() {
        const part = live && live.querySelector("[data-look-on]");
        if (!part) return;
        part.querySelector("a").hidden = !stopLooking;
        part.querySelector(".dbtq-looks-on").hidden = stopLooking;
        if (stopLooking || asking) return;
        window.history.replaceState(null, "", part.dataset.lookOn);
        refresh().then(() => {
            stopLooking = stopLooking || stopped || note.classList.contains("dbtq-warning");
            lookOn();
        });
    }

    if (live) {
        live.addEventListener("click", (event) => {
            if (event.target.id === "dbtq-stop") { stopLooking = true; lookOn(); }
        });
        lookOn();
    }

    /* -- the search box completes its last word; pickers search at once --------------------------------------------- */

    const box = document.getElementById("dbtq-q"), choices = document.getElementById("dbtq-words");

    function complete() {
        const words = JSON.parse(choices.dataset.words);
        const [, before, minus, name, values, begun] = box.value.match(/^(.*?)(-?)(?:([\w.]+):((?:[^\s,]*,)*))?([^\s,:]*)$/s);
        const known = name === undefined ? words[""] : words[name] || [];
        const fitting = known.filter((word) => word.toLowerCase().startsWith(begun.toLowerCase()) && word !== begun);
        choices.replaceChildren(...fitting.slice(0, 30).map((word) => {
            const one = document.createElement("option");
            one.value = before + minus + (name === undefined ? "" : name + ":" + values) + word;
            return one;
        }));
    }

    if (box && choices) box.addEventListener("input", complete);
    root.addEventListener("change", (event) => { if (event.target.matches("select.dbtq-auto")) event.target.form.requestSubmit(); });

    /* -- ticking --------------------------------------------------------------------------------------------------- */

    function count() {
        const label = document.getElementById("dbtq-ticked");
        const number = ticked();
        if (label) label.textContent = number ? fill(texts.ticked, {number: number}) : "";
        if (note && !number && note.textContent === texts.held) note.textContent = "";
    }

    root.addEventListener("change", (event) => {
        const box = event.target;
        if (box.matches("input.dbtq-all")) {
            live.querySelectorAll("input[name=_selected_action]").forEach((one) => { one.checked = box.checked; });
        }
        if (box.matches("input[type=checkbox]")) count();
    });
    document.addEventListener("dbtq:refreshed", count);

    /* -- copying --------------------------------------------------------------------------------------------------- */

    root.addEventListener("click", async (event) => {
        const button = event.target.closest("[data-copy]");
        if (!button) return;
        const text = document.getElementById(button.dataset.copy).textContent;
        if (await copied(text)) {
            const before = button.textContent;
            button.textContent = texts.copied;
            window.setTimeout(() => { button.textContent = before; }, 1500);
        }
    });

    /* The clipboard is for https only; on plain http the older way still works. */
    async function copied(text) {
        if (navigator.clipboard && window.isSecureContext) {
            try { await navigator.clipboard.writeText(text); return true; } catch (refused) { /* the older way */ }
        }
        const area = document.createElement("textarea");
        area.value = text;
        area.className = "visually-hidden";
        document.body.append(area);
        area.select();
        const done = document.execCommand("copy");
        area.remove();
        return done;
    }

    /* -- the menu "More" closes with a click elsewhere and with Escape ------------------------------------------------ */

    const menu = root.querySelector(".dbtq-menu");
    document.addEventListener("click", (event) => { if (menu && !menu.contains(event.target)) menu.open = false; });
    document.addEventListener("keydown", (event) => { if (menu && event.key === "Escape") menu.open = false; });

    /* -- keys ------------------------------------------------------------------------------------------------------ */

    const keysOn = document.getElementById("dbtq-keys-on");
    let going = 0;

    function rowsHere() {
        return Array.from(root.querySelectorAll(".dbtq-table tbody tr")).filter((row) => row.closest("dialog") === null);
    }

    function move(step) {
        const rows = rowsHere();
        if (!rows.length) return;
        const at = rows.findIndex((row) => row.classList.contains("dbtq-here"));
        const next = rows[Math.min(Math.max(at + step, 0), rows.length - 1)];
        rows.forEach((row) => row.classList.remove("dbtq-here"));
        next.classList.add("dbtq-here");
        next.scrollIntoView({block: "nearest"});
        const target = next.querySelector("a, input");
        if (target) target.focus({preventScroll: true});
    }

    function here() { return root.querySelector("tr.dbtq-here"); }

    function go(key) {
        const link = root.querySelector(".dbtq-nav a[data-key='" + key + "']");
        if (link) link.click();
    }

    function tick() {
        const box = here() && here().querySelector("input[name=_selected_action]");
        if (box) box.click();
    }

    function openRow() {
        const link = here() && here().querySelector("td a[href]");
        if (link) link.click();
    }

    function search() {
        const box = root.querySelector(".dbtq-search input[type=text], .dbtq-search input[type=search], .dbtq-search input:not([type])");
        if (box) { box.focus(); box.select(); }
    }

    const doing = {
        "/": search, "j": () => move(1), "k": () => move(-1), "x": tick, "q": () => go("q"),
        "r": () => { if (live) refresh(); else window.location.reload(); },
        "?": () => { if (help && !help.open) help.showModal(); },
        "g": () => { going = Date.now(); },
    };

    document.addEventListener("keydown", (event) => {
        const typing = event.target.matches("input:not([type=checkbox]):not([type=radio]), textarea, select, [contenteditable]");
        if (event.key === "Escape" && typing) { event.target.blur(); return; }
        if (typing || event.ctrlKey || event.metaKey || event.altKey || !keysOn || !keysOn.checked) return;
        if (document.querySelector("dialog[open]")) return;
        if (event.key === "Enter") {
            if (event.target === document.body) openRow();
            return;
        }
        if (going && Date.now() - going < 1500 && /^[a-z]$/.test(event.key)) {
            going = 0;
            event.preventDefault();
            go(event.key);
            return;
        }
        going = 0;
        if (Object.hasOwn(doing, event.key)) { event.preventDefault(); doing[event.key](); }
    });

    if (keysOn) {
        keysOn.checked = remember("keys") !== "off";
        keysOn.addEventListener("change", () => remember("keys", keysOn.checked ? "on" : "off"));
        const opener = document.getElementById("dbtq-help-open");
        opener.hidden = false;
        opener.addEventListener("click", () => help.showModal());
    }
})();
