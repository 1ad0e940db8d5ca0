/* Draw all plots in the colours of the colour scheme, and again when it changes. */
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const config = () => {
    const ink = dark.matches ? "#d6d9df" : "#2b3039";
    const muted = dark.matches ? "#a2a8b3" : "#5c6470";
    const background = getComputedStyle(document.documentElement).getPropertyValue("--card").trim();
    const grid = dark.matches ? "#343a45" : "#e3e6eb";
    const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif";
    return {
      background: null, font,
      view: { stroke: null },
      axis: {
        labelColor: muted, titleColor: ink, gridColor: grid, domainColor: grid, tickColor: grid,
        labelFontSize: 11, titleFontSize: 12, titleFontWeight: 500, titlePadding: 8,
      },
      text: { color: ink, fontSize: 11.5 },
      rule: { color: muted },
      style: { outline: { stroke: background, strokeWidth: 4, strokeJoin: "round" } },
    };
  };
  const draw = async () => {
    for (const plot of document.querySelectorAll(".plot")) {
      const spec = JSON.parse(plot.nextElementSibling.textContent);
      await vegaEmbed(plot, spec, { actions: false, renderer: "svg", config: config(), tooltip: { theme: dark.matches ? "dark" : "light" } });
    }
    document.documentElement.dataset.drawn = "yes";
  };
  dark.addEventListener("change", draw);
  draw();
})();
