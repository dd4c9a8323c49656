-- Refuses a request whose body may not have arrived, after reading the rest of it: a client that is still sending would
-- else see a reset connection instead of the answer. It gives up reading at a limit of bytes and time, and it never
-- routes.
--
-- In: txn.refusal, the JSON body of the answer; txn.refusal_status; txn.refusal_retry_after, seconds, may be missing.

local MAX_READ_BYTES = 256 * 1024 * 1024
local MAX_READ_S = 30
local PIECE_BYTES = 1024 * 1024

local function refuse(applet)
    local give_up_at = core.now().sec + MAX_READ_S
    local read_bytes = 0
    while read_bytes < MAX_READ_BYTES and core.now().sec < give_up_at do
        local piece = applet:receive(PIECE_BYTES)
        if not piece or #piece == 0 then break end
        read_bytes = read_bytes + #piece
    end
    local answer = applet:get_var("txn.refusal")
    local retry_after = applet:get_var("txn.refusal_retry_after")
    applet:set_status(applet:get_var("txn.refusal_status"))
    applet:add_header("content-type", "application/json")
    applet:add_header("content-length", tostring(#answer))
    if retry_after then applet:add_header("retry-after", tostring(retry_after)) end
    applet:start_response()
    applet:send(answer)
end

core.register_service("refuse", "http", refuse)
