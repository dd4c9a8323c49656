-- Reads a request body that HAProxy's own json_query could not route: finds the model where the body is valid JSON
-- after all (nested deeper than 20 levels, escapes in the name), else says exactly what is wrong with it. It runs only
-- on that path, and it picks no cell.
--
-- In: the buffered body. Out: txn.model, and txn.pool, if that is a model of the table; or txn.body_error with
-- txn.body_code and txn.body_param (a JSON literal).

local models = Map.new("models.map", Map._str)

local MAX_DEPTH = 500 -- well inside Lua's stack; no real request nests as deep

local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local KINDS = { ["{"] = "an object", ["["] = "a list", t = "a boolean", f = "a boolean", n = "null" }

local function fail(what, at)
    error({ reason = what .. " at byte " .. at }, 0)
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
            local escape = text:sub(here + 1, here + 1)
            if not (ESCAPES[escape] or text:find("^u%x%x%x%x", here + 1)) then fail("an unknown escape", here) end
        end
        here = here + (found == 92 and 2 or 1)
    end
end

-- Two UTF-16 surrogates make one character; a lone one is kept as it is, the map of models will not know it.
local function unescape(raw)
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

-- Returns the position after the object; calls `on_member(key, start, stop)` for each of its members.
local function skip_object(text, at, depth, on_member)
    local here = skip_space(text, at + 1)
    if text:sub(here, here) == "}" then return here + 1 end
    while true do
        if text:sub(here, here) ~= '"' then fail("a key in quotes was expected", here) end
        local stop = skip_string(text, here)
        local key = text:sub(here + 1, stop - 2)
        here = skip_space(text, stop)
        if text:sub(here, here) ~= ":" then fail("':' was expected", here) end
        local start = skip_space(text, here + 1)
        here = skip_value(text, start, depth + 1)
        if on_member then on_member(key, start, here - 1) end
        here = skip_space(text, here)
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
    if depth > MAX_DEPTH then fail("nested deeper than " .. MAX_DEPTH .. " levels", at) end
    local first = text:sub(at, at)
    if first == "{" then return skip_object(text, at, depth) end
    if first == "[" then return skip_list(text, at, depth) end
    if first == '"' then return skip_string(text, at) end
    for _, word in ipairs({ "true", "false", "null" }) do
        if text:sub(at, at + #word - 1) == word then return at + #word end
    end
    return skip_number(text, at)
end

-- Returns the raw JSON text of the member "model", or nil.
local function model_of(text)
    local at = skip_space(text, 1)
    if at > #text then error({ reason = "it is empty" }, 0) end
    local model
    local function on_member(key, start, stop)
        if not model and unescape(key) == "model" then model = text:sub(start, stop) end
    end
    local first = text:sub(at, at)
    local stop = first == "{" and skip_object(text, at, 1, on_member) or skip_value(text, at, 1)
    if skip_space(text, stop) <= #text then fail("more text after the end", skip_space(text, stop)) end
    if first ~= "{" then error({ reason = "a JSON object was expected" }, 0) end
    return model
end

local function refuse(txn, code, param, message)
    txn:set_var("txn.body_error", message)
    txn:set_var("txn.body_code", code)
    txn:set_var("txn.body_param", param)
end

local function read_body(txn)
    local ok, model = pcall(model_of, txn.sf:req_body() or "")
    if not ok then
        local reason = type(model) == "table" and model.reason or "it could not be read"
        refuse(txn, "invalid_json", "null", "the request body is not valid JSON: " .. reason)
    elseif not model then
        refuse(txn, "missing_required_parameter", '"model"', "the field `model` is missing: name the model to use")
    elseif model:sub(1, 1) ~= '"' then
        local kind = KINDS[model:sub(1, 1)] or "a number"
        refuse(txn, "invalid_type", '"model"', "the field `model` must be a string, not " .. kind)
    else
        local name = unescape(model:sub(2, -2))
        txn:set_var("txn.model", name)
        local pool = models:lookup(name)
        if pool then txn:set_var("txn.pool", pool) end
    end
end

core.register_action("read_body", { "http-req" }, read_body)
