-- The first request in the queue of a pool on hold waits here. It is released when a cell has room for it, or another
-- region may serve it; or it gets an error because its time is over, or because the pool gets no machines.
--
-- In: txn.deployment; txn.pool and txn.spill, names of backends; txn.held_since_ms, txn.hold_s. Out: txn.goes, or
-- txn.withheld, or nothing.
--
-- Released requests come before all others in the pool's queue. So that their time does not end there, as many are
-- released as there are free places, and one more per cell: the next one when a cell has taken one.

local POLL_MS = 50
local FORGET_S = 1 -- a released request that reached no cell within this time has left

local withheld = Map.new("withheld.map", Map._str) -- shared with the rules, so changes are visible here
local pools = {} -- name of the backend -> released requests that no cell has taken yet

local function now_s()
    local now = core.now()
    return now.sec + now.usec / 1e6
end

local function ring()
    local bell = core.tcp()
    bell:settimeout(1)
    pcall(function() bell:connect("unix@held.sock") end)
    bell:close()
end

local function is_up(stats) return stats.status:sub(1, 2) == "UP" or stats.status == "no check" end

local function standing(backend)
    local cells, free, taken = 0, 0, 0
    for name, server in pairs(backend.servers) do
        local stats = name ~= "no-cell" and server:get_stats()
        if stats then taken = taken + stats.stot end
        if stats and is_up(stats) then
            cells = cells + 1
            free = free + math.max(0, (tonumber(stats.slim) or 0) - stats.scur)
        end
    end
    return cells, free, taken
end

local function has_room(name)
    local backend = core.backends[name]
    if not backend or backend:get_srv_act() == 0 then return false end
    local cells, free, taken = standing(backend)
    local pool = pools[name] or { gone = 0, taken = taken, at_s = 0 }
    pools[name] = pool
    local now = now_s()
    pool.gone = now - pool.at_s > FORGET_S and 0 or math.max(0, pool.gone - math.max(0, taken - pool.taken))
    pool.taken = taken
    if pool.gone >= free + cells then return false end
    pool.gone, pool.at_s = pool.gone + 1, now
    return true
end

local function is_served_elsewhere(name)
    local backend = core.backends[name]
    return backend ~= nil and backend:get_srv_act() + backend:get_srv_bck() > 0
end

core.register_action("wait_for_cell", { "http-req" }, function(txn)
    local pool, spill = txn:get_var("txn.pool"), txn:get_var("txn.spill")
    local gives_up_at = (tonumber(txn:get_var("txn.held_since_ms")) or now_s() * 1000) / 1000
        + (tonumber(txn:get_var("txn.hold_s")) or 0)
    ring()
    while now_s() < gives_up_at do
        -- An old worker does not see new cells: the sender sends the request to the new worker.
        if has_room(pool) or is_served_elsewhere(spill) or tonumber(core.get_info().Stopping) == 1 then
            txn:set_var("txn.goes", 1)
            return
        end
        local by = withheld:lookup(txn:get_var("txn.deployment"))
        if by then
            txn:set_var("txn.withheld", by)
            return
        end
        core.msleep(POLL_MS)
    end
end, 0)
