-- Refuses a request after reading the rest of its body: a client that is still sending would otherwise see a reset
-- connection instead of the response. It stops at a limit of bytes and time.
--
-- For each NAME in its arguments there is a service refuse_NAME. It sends proc.refuse_NAME: status, maximum seconds
-- until a retry (0: a retry cannot help), JSON body. The service `refuse` sends txn.refusal, the JSON body, with
-- txn.refusal_status and, if set, txn.refusal_retry_after_ms. Bodies are in OpenAI's format. If txn.error_open is set
-- (haproxy.cfg.j2), they are sent in Anthropic's, whose types by status are in proc.anthropic_types.

local MAX_READ_BYTES = 256 * 1024 * 1024
local MAX_READ_S = 30
local PIECE_BYTES = 1024 * 1024

local function in_form(applet, status, body)
    local open = applet:get_var("txn.error_open")
    if not open then return body end
    local kind = applet:get_var("proc.anthropic_types"):match(status .. "=(%S+)")
        or (status >= 500 and "api_error" or "invalid_request_error")
    -- The first match is the member: inside a JSON string quotes are escaped.
    return "{" .. open .. body:sub(2):gsub('"type":"[^"]*"', '"type":"' .. kind .. '"', 1)
end

local function refuse(applet, status, retry_after_ms, body)
    local give_up_at = core.now().sec + MAX_READ_S
    local read_bytes = 0
    while read_bytes < MAX_READ_BYTES and core.now().sec < give_up_at do
        local piece = applet:receive(PIECE_BYTES)
        if not piece or #piece == 0 then break end
        read_bytes = read_bytes + #piece
    end
    body = in_form(applet, status, body)
    applet:set_status(status)
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#body))
    local code = body:match('"code":"([%w_]+)"')
    if code then applet:add_header("x-switchyard-error", code) end
    if retry_after_ms then
        applet:add_header("retry-after", tostring(math.max(1, math.ceil(retry_after_ms / 1000))))
        applet:add_header("retry-after-ms", tostring(math.ceil(retry_after_ms)))
    end
    applet:start_response()
    applet:send(body)
end

core.register_service("refuse", "http", function(applet)
    local function refusal(name) return applet:get_var("txn.refusal" .. name) end
    refuse(applet, refusal("_status"), tonumber(refusal("_retry_after_ms")), refusal(""))
end)

for _, name in ipairs({ ... }) do
    core.register_service("refuse_" .. name, "http", function(applet)
        local status, most_s, body = applet:get_var("proc.refuse_" .. name):match("^(%d+) (%d+) (.*)$")
        most_s = tonumber(most_s)
        local least_s = math.max(1, most_s // 2)
        -- Random, so that clients do not retry together.
        refuse(applet, tonumber(status), most_s > 0 and math.random(least_s * 1000, most_s * 1000) or nil, body)
    end)
end
