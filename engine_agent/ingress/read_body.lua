-- Finds the model in a request body in which HAProxy's json_query found no name (nested deeper than 20 levels, escapes
-- in the member's name), or describes the error. It reads no further than the model: the cell checks that the rest is
-- JSON and names the model once. It is limited to so many values of a body and so many bytes a second in total.
--
-- In: the buffered body. Out: txn.model, and txn.pool if the table has it; or txn.body_error with txn.body_code and
-- txn.body_param (a JSON literal); or txn.refusal for refuse.lua if there is too much to read.

local models = Map.new("models.map", Map._str)

local MAX_DEPTH, MAX_MODEL = ...
MAX_DEPTH, MAX_MODEL = tonumber(MAX_DEPTH), tonumber(MAX_MODEL) -- depth: well inside Lua's stack
local MAX_VALUES = 5000 -- before the model, about 2 ms; usual requests have a few hundred
local BURST_BYTES, BYTES_PER_S = 1024 * 1024, 128 * 1024 -- 128 KiB a second are at most about 3 % of a core
local LEAST_BYTES, MOST_BYTES = 1024, 64 * 1024 -- the count of one body; longer ones have few values with much text

local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local KINDS = { ["{"] = "an object", ["["] = "a list", t = "a boolean", f = "a boolean", n = "null" }
local WORDS = { t = "true", f = "false", n = "null" }

local values_left, bytes_left, filled_at_s = 0, BURST_BYTES, nil

local function fail(what, at)
    error({ reason = what .. " at byte " .. at }, 0)
end

local function count()
    values_left = values_left - 1
    if values_left < 0 then
        error({ reason = "its first " .. MAX_VALUES .. " values name no model; put `model` first" }, 0)
    end
end

local function skip_space(text, at)
    return text:find("[^ \t\r\n]", at) or #text + 1
end

-- Returns the position after the string that starts at `at` (a quote).
local function skip_string(text, at)
    local here = at + 1
    while true do
        here = text:find('["\\%c]', here)
        if not here then fail("a string without its end", at) end
        local found = text:byte(here)
        if found == 34 then return here + 1 end
        if found ~= 92 and found ~= 127 then fail("a control character in a string", here) end
        if found == 92 then
            count()
            local escape = text:sub(here + 1, here + 1)
            if not (ESCAPES[escape] or text:find("^u%x%x%x%x", here + 1)) then fail("an unknown escape", here) end
        end
        here = here + (found == 92 and 2 or 1)
    end
end

-- Two UTF-16 surrogates make one character. A lone one stays, and is in no map.
local function unescape(raw)
    if not raw:find("\\", 1, true) then return raw end
    raw = raw:gsub("\\u([dD][89abAB]%x%x)\\u([dD][c-fC-F]%x%x)", function(high, low)
        return utf8.char(0x10000 + (tonumber(high, 16) - 0xD800) * 0x400 + tonumber(low, 16) - 0xDC00)
    end)
    raw = raw:gsub("\\u(%x%x%x%x)", function(code) return utf8.char(tonumber(code, 16)) end)
    return (raw:gsub("\\(.)", ESCAPES))
end

local function skip_number(text, at)
    local rest = select(2, text:find("^-?%d+", at))
    if not rest or text:find("^-?0%d", at) then fail("not a value", at) end
    rest = select(2, text:find("^%.%d+", rest + 1)) or rest
    rest = select(2, text:find("^[eE][+-]?%d+", rest + 1)) or rest
    return rest + 1
end

local skip_value

-- Returns the position after the object; or nil and the position of the value of its member `wanted`.
local function skip_object(text, at, depth, wanted)
    local here = skip_space(text, at + 1)
    if text:sub(here, here) == "}" then return here + 1 end
    while true do
        if text:sub(here, here) ~= '"' then fail("a key in quotes was expected", here) end
        local stop = skip_string(text, here)
        local key = wanted and unescape(text:sub(here + 1, stop - 2))
        here = skip_space(text, stop)
        if text:sub(here, here) ~= ":" then fail("':' was expected", here) end
        here = skip_space(text, here + 1)
        if wanted and key == wanted then return nil, here end
        here = skip_space(text, skip_value(text, here, depth + 1))
        local mark = text:sub(here, here)
        if mark == "}" then return here + 1 end
        if mark ~= "," then fail("',' or '}' was expected", here) end
        here = skip_space(text, here + 1)
    end
end

local function skip_list(text, at, depth)
    local here = skip_space(text, at + 1)
    if text:sub(here, here) == "]" then return here + 1 end
    while true do
        here = skip_space(text, skip_value(text, here, depth + 1))
        local mark = text:sub(here, here)
        if mark == "]" then return here + 1 end
        if mark ~= "," then fail("',' or ']' was expected", here) end
        here = skip_space(text, here + 1)
    end
end

function skip_value(text, at, depth)
    count()
    if depth > MAX_DEPTH then fail("nested deeper than " .. MAX_DEPTH .. " levels", at) end
    local first = text:sub(at, at)
    if first == "{" then return skip_object(text, at, depth) end
    if first == "[" then return skip_list(text, at, depth) end
    if first == '"' then return skip_string(text, at) end
    local word = WORDS[first]
    if word and text:sub(at, at + #word - 1) == word then return at + #word end
    return skip_number(text, at)
end

-- Returns the position and kind of the value of the body's member "model", or nil.
local function find_model(text)
    values_left = MAX_VALUES
    local at = skip_space(text, 1)
    if at > #text then error({ reason = "it is empty" }, 0) end
    local is_object = text:sub(at, at) == "{"
    local stop, model
    if is_object then
        stop, model = skip_object(text, at, 1, "model")
        if model then return model, text:sub(model, model) end
    else
        stop = skip_value(text, at, 1)
    end
    if skip_space(text, stop) <= #text then fail("more text after the end", skip_space(text, stop)) end
    if not is_object then error({ reason = "a JSON object was expected" }, 0) end
end

local function model_of(text)
    local at, first = find_model(text)
    if not at then return end
    if first == '"' then return unescape(text:sub(at + 1, skip_string(text, at) - 2)) end
    if not KINDS[first] then skip_number(text, at) end
    return nil, KINDS[first] or "a number"
end

local function refuse(txn, code, param, message)
    txn:set_var("txn.body_error", message)
    txn:set_var("txn.body_code", code)
    txn:set_var("txn.body_param", param)
end

-- One budget for all clients, because a body costs by its bytes.
local function may_read(bytes)
    local now_s = core.now().sec
    bytes_left = math.min(BURST_BYTES, bytes_left + (now_s - (filled_at_s or now_s)) * BYTES_PER_S)
    filled_at_s = now_s
    if bytes_left < 0 then return false end
    bytes_left = bytes_left - math.max(LEAST_BYTES, math.min(bytes, MOST_BYTES))
    return true
end

local function read_body(txn)
    local body = txn.sf:req_body() or ""
    if not may_read(#body) then
        txn:set_var("txn.refusal_status", 429)
        txn:set_var("txn.refusal_retry_after_ms", 1000)
        txn:set_var("txn.refusal", '{"error":{"message":"too many request bodies name no model, or not where it is found '
            .. 'at once: put `model` first, and try again shortly","type":"requests","param":null,'
            .. '"code":"rate_limit_exceeded"}}')
        return
    end
    local ok, model, kind = pcall(model_of, body)
    if not ok then
        local reason = type(model) == "table" and model.reason or "it could not be read"
        refuse(txn, "invalid_json", "null", "the request body is not valid JSON: " .. reason)
    elseif kind then
        refuse(txn, "invalid_type", '"model"', "the field `model` must be a string, not " .. kind)
    elseif model and model:find("\0", 1, true) then
        refuse(txn, "invalid_value", '"model"', "the field `model` has a NUL character in it")
    elseif model and #model > MAX_MODEL then
        refuse(txn, "invalid_value", '"model"', "the field `model` has " .. #model .. " bytes; names of models have at most "
            .. MAX_MODEL)
    elseif not model then
        refuse(txn, "missing_required_parameter", '"model"', "the field `model` is missing: name the model to use")
    else
        txn:set_var("txn.model", model)
        local pool = models:lookup(model)
        if pool then txn:set_var("txn.pool", pool) end
    end
end

core.register_action("read_body", { "http-req" }, read_body)
