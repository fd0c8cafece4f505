// The address of a view: its place, then the filter, both after "#", so that a link opens the same view.

export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?");
  const params = Object.fromEntries(new URLSearchParams(search));
  const names = path.split("/").filter(Boolean);
  const place = { view: "runs", params };
  if (names[0] === "compare") return { ...place, view: "compare" };
  if (names[0] !== "run") return place;
  place.run = count(names[1]);
  place.view = "run";
  for (let at = 2; at < names.length; at++) {
    const name = names[at];
    if (name === "tokens") place.view = "tokens";
    else if (["step", "group", "rollout", "timing"].includes(name)) {
      place[name === "timing" ? "step" : name] = count(names[++at]);
      place.view = name === "rollout" ? "episode" : name;
    } else if (name === "break") {
      place.call = count(names[++at]);
      place.view = "break";
    } else place.view = "missing";
  }
  return place;
}

function count(text) {
  return /^\d{1,15}$/.test(text || "") ? Number(text) : NaN;
}

// Returns the address of a place; only the filter and what is given is kept of the parameters.
export function link(place, params = {}) {
  let path = "#/";
  if (place.view === "compare") path = "#/compare";
  else if (place.run !== undefined) {
    path = `#/run/${place.run}`;
    if (place.group !== undefined) {
      path += `/group/${place.group}`;
      if (place.rollout !== undefined) path += `/rollout/${place.rollout}`;
      if (place.view === "tokens") path += "/tokens";
      if (place.view === "break") path += `/break/${place.call}`;
    } else if (place.step !== undefined) path += `/${place.view === "timing" ? "timing" : "step"}/${place.step}`;
  }
  const kept = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return kept.length ? `${path}?${new URLSearchParams(kept)}` : path;
}
