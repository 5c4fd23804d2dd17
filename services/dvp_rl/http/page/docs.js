"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", colour);
colour();

// Not relative: a page whose address holds a password may not fetch relative addresses. Calls go to where this page
// came from, also under a prefix that a proxy removes.
const base = location.origin + location.pathname.replace(/docs\/?$/, "");

const show = async () => {
  const answer = await fetch(`${base}openapi.json`);
  if (!answer.ok) throw new Error(`openapi.json: ${answer.status} ${answer.statusText}`);
  const spec = await answer.json();
  document.title = spec.info.title;
  SwaggerUIBundle({
    spec: { ...spec, servers: [{ url: base.replace(/\/$/, "") }] },
    domNode: document.getElementById("api"),
    presets: [SwaggerUIBundle.presets.apis],
    defaultModelsExpandDepth: 0,
    deepLinking: true,
    validatorUrl: null, // would send the document's address to a server on the internet
  });
};

show().catch((error) => { document.getElementById("api").textContent = `The interface cannot be shown: ${error.message}`; });
