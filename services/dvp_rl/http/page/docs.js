"use strict";

const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = () => document.documentElement.classList.toggle("dark-mode", dark.matches);
dark.addEventListener("change", colour);
colour();

SwaggerUIBundle({
  url: "openapi.json",
  domNode: document.getElementById("api"),
  presets: [SwaggerUIBundle.presets.apis],
  defaultModelsExpandDepth: 0,
  deepLinking: true,
  validatorUrl: null, // would send the document's address to a server on the internet
  onComplete: () => {
    document.title = document.querySelector("#api .title")?.firstChild?.textContent || document.title;
  },
});
