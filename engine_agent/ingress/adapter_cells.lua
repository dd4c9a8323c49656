-- Picks a cell for a request whose adapter only some cells of its pool have: of those that are up, the one with the
-- fewest running and waiting requests. If it is full, the request waits there.
--
-- In: txn.pool; txn.holders, `/` and a server for each that has the adapter. Out: txn.cell_server, or nothing if none
-- is up.

local function is_up(server)
    local status = server and server:get_stats().status or ""
    return status:sub(1, 2) == "UP" or status == "no check"
end

local function pick_holder(txn)
    local known = core.backends[txn:get_var("txn.pool")]
    local best, fewest = nil, math.huge
    for name in txn:get_var("txn.holders"):gmatch("[^/]+") do
        local server = known and known.servers[name]
        if is_up(server) then
            local here = server:get_cur_sess() + server:get_pend_conn()
            if here < fewest then best, fewest = name, here end
        end
    end
    if best then txn:set_var("txn.cell_server", best) else txn:unset_var("txn.cell_server") end
end

core.register_action("pick_holder", { "http-req" }, pick_holder)

-- The number of servers of "BACKEND/SERVER/SERVER" that are up.
core.register_converters("holders_up", function(text)
    local count, known = 0, nil
    for word in text:gmatch("[^/]+") do
        if not known then
            known = core.backends[word]
            if not known then return 0 end
        elseif is_up(known.servers[word]) then
            count = count + 1
        end
    end
    return count
end)
