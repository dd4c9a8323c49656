-- Refuses a request whose body may not have arrived, after reading the rest of it: a client that is still sending would
-- else see a reset connection instead of the answer. It gives up reading at a limit of bytes and time, and it never
-- routes.
--
-- For each NAME that it is loaded with there is a service refuse_NAME, which says what proc.refuse_NAME says: status,
-- most seconds until one should ask again (0: that cannot help), JSON body. The service `refuse` says what is in txn.refusal,
-- the JSON body, txn.refusal_status, and txn.refusal_retry_after, seconds, which may be missing.

local MAX_READ_BYTES = 256 * 1024 * 1024
local MAX_READ_S = 30
local PIECE_BYTES = 1024 * 1024

local function refuse(applet, status, retry_after_s, answer)
    local give_up_at = core.now().sec + MAX_READ_S
    local read_bytes = 0
    while read_bytes < MAX_READ_BYTES and core.now().sec < give_up_at do
        local piece = applet:receive(PIECE_BYTES)
        if not piece or #piece == 0 then break end
        read_bytes = read_bytes + #piece
    end
    applet:set_status(status)
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#answer))
    if retry_after_s then applet:add_header("retry-after", tostring(retry_after_s)) end
    applet:start_response()
    applet:send(answer)
end

core.register_service("refuse", "http", function(applet)
    local function told(name) return applet:get_var("txn.refusal" .. name) end
    refuse(applet, told("_status"), told("_retry_after"), told(""))
end)

for _, name in ipairs({ ... }) do
    core.register_service("refuse_" .. name, "http", function(applet)
        local status, most_s, answer = applet:get_var("proc.refuse_" .. name):match("^(%d+) (%d+) (.*)$")
        most_s = tonumber(most_s)
        local least_s = math.max(1, most_s // 2)
        -- At random, so that those who were refused together do not come back together.
        refuse(applet, tonumber(status), most_s > 0 and math.random(least_s, most_s) or nil, answer)
    end)
end
