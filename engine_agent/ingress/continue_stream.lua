-- Picks a cell for a stream that continues: one that answers alike, is up, has its adapter, and that it did not
-- leave. The cell that was picked for its prompt's cache stays, if it is one of them; otherwise the one with the fewest
-- requests.
--
-- In: txn.pool; txn.continuers, `/` and a server for each cell that answers alike; txn.holders, the same for each that has
-- the adapter, if not all do; txn.avoided, servers separated by commas; txn.cell_server, if one was picked.
-- Out: txn.cell_server, or nothing if no cell can continue the stream.

local function is_up(server)
    local status = server and server:get_stats().status or ""
    return status:sub(1, 2) == "UP" or status == "no check"
end

local function continue_stream(txn)
    local known = core.backends[txn:get_var("txn.pool")]
    local avoided, picked = {}, txn:get_var("txn.cell_server")
    for name in (txn:get_var("txn.avoided") or ""):gmatch("[^,]+") do avoided[name] = true end
    local best, fewest, holders = nil, math.huge, txn:get_var("txn.holders")
    local holds = function(name) return not holders or (holders .. "/"):find("/" .. name .. "/", 1, true) end
    for name in txn:get_var("txn.continuers"):gmatch("[^/]+") do
        local server = known and known.servers[name]
        if not avoided[name] and holds(name) and is_up(server) and not server:is_draining() then
            local here = server:get_cur_sess() + server:get_pend_conn()
            if name == picked then here = -1 end
            if here < fewest then best, fewest = name, here end
        end
    end
    if best then txn:set_var("txn.cell_server", best) else txn:unset_var("txn.cell_server") end
end

core.register_action("continue_stream", { "http-req" }, continue_stream)
