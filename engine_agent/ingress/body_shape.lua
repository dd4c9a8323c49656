-- Refuses a body whose shape a later reader could not take, or could understand in another way: nested too deeply, a name
-- that is too long or has a NUL, a NUL in the model's name. Whether the rest is JSON is for the cell to check.
--
-- Loaded with the deepest nesting, the longest name in bytes and the most objects and lists (strict_json.py), for every thread.
-- In: the buffered body, txn.model. Out: txn.body_error with txn.body_code and txn.body_param (a JSON literal), or nothing.
--
-- A short body with few brackets and no NUL is passed by searches for single bytes. Everything else is read once.

local MAX_DEPTH, MAX_NAME, MAX_CONTAINERS = ...
MAX_DEPTH, MAX_NAME, MAX_CONTAINERS = tonumber(MAX_DEPTH), tonumber(MAX_NAME), tonumber(MAX_CONTAINERS)
local LONG_BYTES = 32 * 1024 -- bodies beyond are read in any case
local QUOTE, BACKSLASH, NUL = 34, 92, "\\u0000"

local find, byte = string.find, string.byte

local function may_be_deep(text)
    local count = 0
    for _, sign in ipairs({ "{", "[" }) do
        local here = find(text, sign, 1, true)
        while here do
            count = count + 1
            if count > MAX_DEPTH then return true end
            here = find(text, sign, here + 1, true)
        end
    end
end

-- Whether the character at `at` is escaped by a backslash before it.
local function is_escaped(text, at)
    local before = at - 1
    while byte(text, before) == BACKSLASH do before = before - 1 end
    return (at - before) % 2 == 0
end

local function string_end(text, at)
    local stop = find(text, '"', at + 1, true)
    while stop and is_escaped(text, stop) do stop = find(text, '"', stop + 1, true) end
    return stop
end

-- The next NUL from `at` on, or nothing.
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
            -- "[" and "{" are 91 and 123, what closes them two more.
            local opens = sign == 91 or sign == 123
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

core.register_action("check_shape", { "http-req" }, function(txn)
    local text = txn.sf:req_body()
    local nul = next_nul(text, 1)
    if nul and find(txn:get_var("txn.model") or "", "\0", 1, true) then
        txn:set_var("txn.body_error", "the field `model` has a NUL character in it")
        txn:set_var("txn.body_code", "invalid_value")
        txn:set_var("txn.body_param", '"model"')
        return
    end
    if #text <= LONG_BYTES and not nul and not may_be_deep(text) then return end
    local fault = fault_of(text, nul)
    if fault then
        txn:set_var("txn.body_error", "the request body cannot be used: " .. fault)
        txn:set_var("txn.body_code", "invalid_json")
        txn:set_var("txn.body_param", "null")
    end
end)
