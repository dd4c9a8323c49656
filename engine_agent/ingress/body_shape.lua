-- Refuses a body that a cell could not parse, or could read differently: nested too deeply, a name that is too long or
-- has a NUL, a NUL in the model's name. The cell checks whether the rest is JSON.
--
-- Loaded per thread, with the deepest nesting, the longest name in bytes and the maximum of objects and lists
-- (strict_json.py). In: the buffered body, txn.model. Out: txn.body_error with txn.body_code and txn.body_param (a JSON
-- literal), or nothing.
--
-- Searches for single bytes pass nearly every body. Only a suspicious body is parsed once.

local MAX_DEPTH, MAX_NAME, MAX_CONTAINERS = ...
MAX_DEPTH, MAX_NAME, MAX_CONTAINERS = tonumber(MAX_DEPTH), tonumber(MAX_NAME), tonumber(MAX_CONTAINERS)
local QUOTE, COMMA, COLON, BRACKET, BACKSLASH = 34, 44, 58, 91, 92
local NUL = "\\u0000"

local find, byte = string.find, string.byte

-- The last character before `at` that is no space, and its position.
local function before(text, at)
    at = at - 1
    local sign = byte(text, at)
    while sign == 32 or sign == 10 or sign == 13 or sign == 9 do
        at = at - 1
        sign = byte(text, at)
    end
    return sign, at
end

-- An object or a list begins the text, or follows a comma, a colon or a bracket. That is rare in prose and code.
local function may_be_deep(text)
    local count = 0
    for _, opening in ipairs({ "{", "[" }) do
        local here = find(text, opening, 1, true)
        while here do
            local sign = before(text, here)
            if not sign or sign == COMMA or sign == COLON or sign == BRACKET then
                count = count + 1
                if count > MAX_DEPTH then return true end
            end
            here = find(text, opening, here + 1, true)
        end
    end
end

-- A name that ends with a quote and a colon, without another quote for this long.
local function may_have_long_name(text)
    local here = find(text, ":", MAX_NAME, true)
    while here do
        local sign, stop = before(text, here)
        if sign == QUOTE and find(text, '"', math.max(1, stop - MAX_NAME - 1), true) == stop then return true end
        here = find(text, ":", here + 1, true)
    end
end

-- Whether a backslash escapes the character at `at`.
local function is_escaped(text, at)
    local other = at - 1
    while byte(text, other) == BACKSLASH do other = other - 1 end
    return (at - other) % 2 == 0
end

local function string_end(text, at)
    local stop = find(text, '"', at + 1, true)
    while stop and is_escaped(text, stop) do stop = find(text, '"', stop + 1, true) end
    return stop
end

-- The next NUL from `at` on, or nil.
local function next_nul(text, at)
    local here = find(text, NUL, at, true)
    while here and is_escaped(text, here) do here = find(text, NUL, here + 1, true) end
    return here
end

local function fault_of(text, nul)
    local depth, containers, at = 0, 0, 1
    while true do
        local here = find(text, '["%[%]{}]', at)
        if not here then return end
        local sign = byte(text, here)
        if sign == QUOTE then
            local stop = string_end(text, here)
            if not stop then return end
            if nul and nul < here then nul = next_nul(text, here) end
            local is_odd = nul and nul < stop or stop - here - 1 > MAX_NAME
            if is_odd and find(text, "^[ \t\r\n]*:", stop + 1) then
                if stop - here - 1 > MAX_NAME then return "a member has a name of more than " .. MAX_NAME .. " bytes" end
                return "a member has a NUL in its name"
            end
            at = stop + 1
        else
            local opens = sign == BRACKET or sign == 123
            depth = depth + (opens and 1 or -1)
            if depth > MAX_DEPTH then return "it is nested deeper than " .. MAX_DEPTH .. " levels" end
            if opens then
                containers = containers + 1
                if containers > MAX_CONTAINERS then return "it has more than " .. MAX_CONTAINERS .. " objects and lists" end
            end
            at = here + 1
        end
    end
end

core.register_converters("may_be_odd", function(text)
    return (find(text, NUL, 1, true) or may_be_deep(text) or may_have_long_name(text)) and true or false
end)

core.register_action("check_shape", { "http-req" }, function(txn)
    local text = txn.sf:req_body()
    local nul = next_nul(text, 1)
    if nul and find(txn:get_var("txn.model") or "", "\0", 1, true) then
        txn:set_var("txn.body_error", "the field `model` has a NUL character in it")
        txn:set_var("txn.body_code", "invalid_value")
        txn:set_var("txn.body_param", '"model"')
        return
    end
    if not (nul or may_be_deep(text) or may_have_long_name(text)) then return end
    local fault = fault_of(text, nul)
    if fault then
        txn:set_var("txn.body_error", "the request body cannot be used: " .. fault)
        txn:set_var("txn.body_code", "invalid_json")
        txn:set_var("txn.body_param", "null")
    end
end)
