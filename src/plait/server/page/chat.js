"use strict";

// The page of one conversation. Everything it asks for is on this server, under the OpenAI API.

const $ = (id) => document.getElementById(id);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];

let messages = []; // {role, content} of the conversation, without the system prompt
let running = null; // AbortController while an answer is being generated

function headers() {
  const key = sessionStorage.getItem("plait-key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function loadModels() {
  let response;
  try {
    response = await fetch("v1/models", { headers: headers() });
  } catch {
    return setStatus("The server cannot be reached.");
  }
  $("key-form").hidden = response.status !== 401;
  if (response.status === 401) {
    $("key").focus();
    return setStatus(sessionStorage.getItem("plait-key") ? "This key is not accepted." : "");
  }
  const list = (await response.json()).data ?? [];
  $("model").replaceChildren(...list.map((model) => new Option(model.id)));
  if (!list.length) {
    setStatus("The model is being loaded ...");
    return setTimeout(loadModels, 1000);
  }
  setStatus("");
  $("message").focus();
}

function requestBody() {
  const body = { model: $("model").value, stream: true, stream_options: { include_usage: true } };
  const system = $("system").value.trim();
  body.messages = system ? [{ role: "system", content: system }, ...messages] : messages;
  for (const name of SAMPLING) {
    const text = $(name).value;
    if (text !== "") body[name === "max_tokens" ? "max_completion_tokens" : name] = Number(text);
  }
  if ($("probabilities").checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

// The data of each server-sent event, parsed.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function ask() {
  const conversation = messages; // "New" may replace it meanwhile
  const view = addTurn("assistant", "");
  const answer = { role: "assistant", content: "" };
  const timer = { start: performance.now(), first: null, tokens: 0, usage: null };
  running = new AbortController();
  setRunning(true);
  let failed = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(requestBody()),
      signal: running.signal,
    });
    if (!response.ok) {
      if (response.status === 401) $("key-form").hidden = false;
      throw new Error((await response.json()).error.message);
    }
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) timer.usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const text = choice.delta.content ?? "";
      if (text || choice.logprobs) {
        timer.first ??= performance.now();
        timer.tokens += 1;
      }
      answer.content += text;
      view.add(text, choice.logprobs?.content);
      if (choice.finish_reason === "length") view.note("(stopped: the limit of tokens is reached)");
      showSpeed(timer);
    }
  } catch (error) {
    if (error.name === "AbortError") view.note("(stopped)");
    else failed = error.message;
  }
  running = null;
  setRunning(false);
  showSpeed(timer);
  if (failed) view.fail(failed);
  if (answer.content) conversation.push(answer);
  else takeBack(conversation);
}

// A question that got no answer goes back to where it was typed.
function takeBack(conversation) {
  const question = conversation.pop();
  if (conversation === messages && !$("message").value) $("message").value = question.content;
}

function showSpeed(timer) {
  if (timer.first === null) return;
  const tokens = timer.usage?.completion_tokens ?? timer.tokens;
  const seconds = (performance.now() - timer.first) / 1000;
  if (running || timer.usage) timer.speed = tokens > 1 && seconds > 0 ? ((tokens - 1) / seconds).toFixed(1) : null;
  const wait = ((timer.first - timer.start) / 1000).toFixed(2);
  setStatus(`${tokens} tokens${timer.speed ? `, ${timer.speed} tokens/s` : ""}, first after ${wait} s`);
}

function addTurn(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const paragraph = document.createElement("p");
  paragraph.textContent = text;
  turn.append(paragraph);
  $("conversation").append(turn);
  turn.scrollIntoView({ block: "end" });
  const bytes = new TextDecoder(); // a character may be spread over several tokens
  return {
    add(more, entries) {
      const main = $("conversation");
      const atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < 80;
      if (entries) for (const entry of entries) paragraph.append(tokenView(entry, bytes, turn));
      else paragraph.append(more);
      if (atEnd) main.scrollTop = main.scrollHeight;
    },
    note(words) {
      const small = document.createElement("small");
      small.textContent = words;
      turn.append(small);
    },
    fail(words) {
      turn.classList.add("error");
      this.note(words);
    },
  };
}

// A token as a button, coloured from red (unlikely) to green; pressing it lists the alternatives.
function tokenView(entry, bytes, turn) {
  const probability = Math.exp(entry.logprob);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "token";
  button.style.setProperty("--hue", String(Math.round(120 * probability)));
  button.textContent = bytes.decode(new Uint8Array(entry.bytes), { stream: true });
  button.title = `${(100 * probability).toFixed(1)} %`;
  button.addEventListener("click", () => {
    turn.querySelector("table")?.remove();
    const table = document.createElement("table");
    table.className = "alternatives";
    for (const other of entry.top_logprobs) {
      const row = table.insertRow();
      row.insertCell().textContent = JSON.stringify(other.token);
      row.insertCell().textContent = `${(100 * Math.exp(other.logprob)).toFixed(1)} %`;
    }
    turn.append(table);
  });
  return button;
}

function setStatus(text) {
  $("status").textContent = text;
}

function setRunning(on) {
  $("send").hidden = on;
  $("stop").hidden = !on;
  (on ? $("stop") : $("message")).focus();
}

function stop() {
  running?.abort();
}

function newConversation() {
  stop();
  messages = [];
  $("conversation").replaceChildren();
  setStatus("");
  $("message").focus();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value;
  if (running || !text.trim()) return;
  $("message").value = "";
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  ask();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
  if (event.altKey && event.key === "n") newConversation();
});
$("stop").addEventListener("click", stop);
$("new").addEventListener("click", newConversation);
$("toggle-settings").addEventListener("click", (event) => {
  $("settings").hidden = !$("settings").hidden;
  event.target.setAttribute("aria-expanded", String(!$("settings").hidden));
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("theme").addEventListener("change", () => {
  document.documentElement.dataset.theme = $("theme").value;
  localStorage.setItem("plait-theme", $("theme").value);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("plait-key", $("key").value);
  $("key").value = "";
  loadModels();
});

$("theme").value = document.documentElement.dataset.theme = localStorage.getItem("plait-theme") ?? "";
loadModels();
