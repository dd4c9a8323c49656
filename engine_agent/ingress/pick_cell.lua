-- Finds the cell of a request's key: the one that served it last, while that is not overloaded; else the least loaded
-- that has room, which is its sticky cell from then on. It notes a name, or none; HAProxy then goes there, or to the cell with
-- the fewest requests, or queues for all of them.
--
-- Overloaded is full, or above `load_bound` times the mean; but a cell that is lightly loaded keeps its keys whatever the
-- others do, because a bound on the mean forbids a second request at a cell while the pool is nearly idle.
--
-- In: txn.cells, the value of the pool's entry in cells.map; the request, tracked as sc2 by its key, with its sticky cell
-- as gpt0. Out: txn.cell_server, the name of a server, and txn.sticky_cell, the number that stands for it in the table; or nothing.

local LIGHT_SHARE = 0.25 -- of what a cell runs at once: up to here it is not overloaded

local STATUS_AGE_S = 0.1

local pools = {} -- backend -> its cells, read anew when the text changes
local turn = 0   -- so that equally loaded cells get new keys in turn

-- FNV-1a: the number of a cell is the same in other threads and in the worker after a reload.
local function number_of(name)
    local hash = 2166136261
    for at = 1, #name do hash = ((hash ~ name:byte(at)) * 16777619) & 0xffffffff end
    return math.max(1, hash)
end

local function read(text)
    local bound, cells = text:match("^(%d+) (.*)$")
    local pool = { text = text, bound = tonumber(bound) / 100, cells = {}, by_number = {} }
    for name, limit in cells:gmatch("([^,:]+):(%d+)") do
        local cell = { name = name, limit = tonumber(limit), number = number_of(name) }
        pool.cells[#pool.cells + 1] = cell
        pool.by_number[cell.number] = cell
    end
    return pool
end

-- Whether its health check says that it wants nothing new, as of up to STATUS_AGE_S ago: asking costs what a request does.
local function drains_itself(backend, cell, server)
    local now = core.now()
    local now_s = now.sec + now.usec / 1e6
    if not cell.seen_s or now_s - cell.seen_s > STATUS_AGE_S then
        cell.seen_s, cell.stops = now_s, server:get_stats().status:sub(1, 4) == "NOLB"
    end
    return cell.stops
end

-- The share of the cell that is in use, or nothing if it cannot take a request.
local function load_of(txn, backend, cell)
    local server = core.backends[backend].servers[cell.name]
    if not server or server:is_draining() or drains_itself(backend, cell, server) then return end
    local running = server:get_cur_sess()
    if running < cell.limit and txn.f:srv_is_up(backend .. "/" .. cell.name) then return running / cell.limit end
end

local function least_loaded(txn, backend, pool)
    local best, least = nil, math.huge
    turn = turn + 1
    for at = 1, #pool.cells do
        local cell = pool.cells[(turn + at) % #pool.cells + 1]
        local load = load_of(txn, backend, cell)
        if load and load < least then best, least = cell, load end
    end
    return best
end

local function pick_cell(txn)
    local backend, text = txn:get_var("txn.pool"), txn:get_var("txn.cells")
    if not text then return end
    local pool = pools[backend]
    if not pool or pool.text ~= text then
        pool = read(text)
        pools[backend] = pool
    end
    local cell = pool.by_number[txn.f:sc_get_gpt0(2)]
    local load = cell and load_of(txn, backend, cell)
    if load and load >= LIGHT_SHARE then
        -- be_conn counts this request, too; nbsrv is not 0, because this cell is up.
        local mean_bound = math.ceil(pool.bound * txn.f:be_conn(backend) / txn.f:nbsrv(backend))
        if load * cell.limit >= mean_bound then load = nil end
    end
    if not load then cell = least_loaded(txn, backend, pool) end
    if cell then
        txn:set_var("txn.cell_server", cell.name)
        txn:set_var("txn.sticky_cell", cell.number)
    end
end

core.register_action("pick_cell", { "http-req" }, pick_cell)
