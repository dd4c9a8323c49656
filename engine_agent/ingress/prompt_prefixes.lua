-- Hashes the beginnings of a request's text. Each hash includes the previous one, so equal hashes mean equal
-- beginnings. It reads the body as bytes and knows no tokens.
--
-- In: the buffered body. Out: txn.prefixes, `BYTES:END,END,…:HASHES` (parsed by
-- engine_agent/cell_proxy/prefix_index.py), or nothing if the body has no known text. `BYTES` is the length from the
-- beginning of the text to the end of the body.
--
-- The text follows `messages`, `prompt` or `input`. Other parts of a prompt (tools, a system text, template arguments)
-- come before the text for an engine, wherever they are in the body, so their hash starts the chain. Another spelling
-- of the same body is another text, which only costs a cache hit.

local TEXTS = { '"messages"', '"prompt"', '"input"' }
local MEMBERS = {
    '"tools"', '"tool_choice"', '"functions"', '"system"', '"instructions"', '"documents"', '"chat_template"',
    '"chat_template_kwargs"', '"reasoning"', '"reasoning_effort"', '"cache_salt"', '"truncate_prompt_tokens"',
    '"add_special_tokens"', '"mm_processor_kwargs"',
}
local STEP, SHARE = 256, 8 -- beginnings end every 256 bytes, later every eighth of what is before: 73 of them in 4 MiB
local MOST_LOOKS = 16      -- of the same word: `system` is also a role

local function after_colon(body, stop)
    return body:match("^%s*:%s*()", stop + 1)
end

-- The approximate value at this position: brackets in its strings can end it earlier or later than JSON would.
local function value_at(body, at)
    local first = body:sub(at, at)
    if first == "{" then return body:match("^%b{}", at) or body:sub(at) end
    if first == "[" then return body:match("^%b[]", at) or body:sub(at) end
    if first ~= '"' then return body:match("^[^,}%s]*", at) end
    local here = at + 1
    while true do
        local stop = body:find('["\\]', here)
        if not stop then return body:sub(at) end
        if body:byte(stop) == 34 then return body:sub(at, stop) end
        here = stop + 2
    end
end

local function find_member(body, word)
    local here = 1
    for _ = 1, MOST_LOOKS do
        local start, stop = body:find(word, here, true)
        if not start then return end
        local at = after_colon(body, stop)
        if at then return start, at end
        here = stop + 1
    end
end

local function text_start(body)
    for _, word in ipairs(TEXTS) do
        local start = find_member(body, word)
        if start then return start end
    end
end

core.register_action("name_prefixes", { "http-req" }, function(txn)
    local body = txn.f:req_body()
    local start = body and text_start(body)
    if not start then return end
    local bytes = #body - start + 1
    if bytes < STEP then return end
    local hash = 0
    for _, word in ipairs(MEMBERS) do
        local _, at = find_member(body, word)
        if at then hash = txn.c:xxh64(string.pack("<i8", hash) .. word .. value_at(body, at), 0) end
    end
    local ends, hashes, done = {}, {}, 0
    while true do
        local stop = done + math.max(STEP, done // SHARE)
        if stop > bytes then break end
        hash = txn.c:xxh64(string.pack("<i8", hash) .. body:sub(start + done, start + stop - 1), 0)
        ends[#ends + 1] = stop
        hashes[#hashes + 1] = string.format("%012x", hash & 0xffffffffffff)
        done = stop
    end
    txn:set_var("txn.prefixes", bytes .. ":" .. table.concat(ends, ",") .. ":" .. table.concat(hashes))
end)
