-- Chat requests for wrk: PROMPTS different bodies of about SIZE bytes, in turn; with COLD set, every
-- body begins anew, so that no prefix is ever known.
local size = tonumber(os.getenv("SIZE"))
local cold = os.getenv("COLD") == "1"
local prompts = tonumber(os.getenv("PROMPTS"))

local function text(length, seed)
  local words, have = {}, 0
  while have < length do
    local word = "w" .. (seed * 7919 + have * 31) % 99991 .. " "
    words[#words + 1] = word
    have = have + #word
  end
  return table.concat(words):sub(1, length)
end

local function body(system, user)
  return '{"model":"m","messages":[{"role":"system","content":"' .. system ..
    '"},{"role":"user","content":"' .. user .. '"}],"max_tokens":16}'
end

local texts = {}
for i = 1, prompts do
  texts[i] = { text(size * 0.6, i), text(size * 0.3, i + 1000) }
end

wrk.method = "POST"
wrk.headers["Content-Type"] = "application/json"
local count = 0
request = function()
  count = count + 1
  local pair = texts[1 + count % prompts]
  local system = cold and (count .. " " .. pair[1]) or pair[1]
  return wrk.format(nil, "/v1/chat/completions", nil, body(system, pair[2]))
end
