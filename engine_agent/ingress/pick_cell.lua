-- Finds the cell of a request: where cells say what they have in their caches, the one that has most of its text, if it is
-- not overloaded. Else, and where that is not worth it, the one that served its key last, while that is not overloaded;
-- else the least loaded that has room. Its cell is the sticky cell of its key from then on. It notes a name, or none; HAProxy
-- then goes there, or to the cell with the fewest requests, or queues for all of them.
--
-- Overloaded is full, or above `load_bound` times its part of what there is, by what each cell runs at once; but a cell that is
-- lightly loaded keeps its keys whatever the others do, because a bound on the mean forbids a second request at a cell while the
-- pool is nearly idle.
--
-- In: txn.cells, the value of the pool's entry in cells.map; the request, tracked as sc2 by its key, with its sticky cell
-- as gpt0; txn.prefixes, if the pool goes by caches; txn.cache_scope, what else tells its blocks from others'.
-- Out: txn.cell_server, the name of a server, and txn.sticky_cell, the number that stands for it in the table; or nothing.
-- txn.scoped_prefixes and txn.matched, for the cell: the beginnings in its scope, and how many bytes that cell is to have.

local LIGHT_SHARE = 0.25 -- of what a cell runs at once: up to here it is not overloaded

local STATUS_AGE_S = 0.1
local WORTH_BYTES = 2048 -- less of a text is read in no time, and many texts begin alike
local LOAD_BYTES = 8192   -- what a request that a cell has is worth: 2,000 tokens, see docs/bench/caches.md
local MASK = 0xffffffffffff

local pools = {} -- backend -> its cells, read anew when the text changes
local turn = 0   -- so that equally loaded cells get new keys in turn

-- FNV-1a: the number of a cell is the same in other threads and in the worker after a reload.
local function number_of(name)
    local hash = 2166136261
    for at = 1, #name do hash = ((hash ~ name:byte(at)) * 16777619) & 0xffffffff end
    return math.max(1, hash)
end

local function read(text)
    local bound, cells = text:match("^(%d+)e? (.*)$")
    local pool = { text = text, bound = tonumber(bound) / 100, cells = {}, by_number = {}, limits = 0 }
    for name, limit in cells:gmatch("([^,:]+):(%d+)") do
        local cell = { name = name, limit = tonumber(limit), number = number_of(name) }
        pool.cells[#pool.cells + 1] = cell
        pool.by_number[cell.number] = cell
        pool.limits = pool.limits + cell.limit
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

-- The share of a cell that is in use, or nothing if it can take no request, or should not by the load of the others.
local function bounded_load(txn, backend, pool, cell)
    local load = load_of(txn, backend, cell)
    if load and load >= LIGHT_SHARE then
        -- be_conn counts this request, too; nbsrv is not 0, because this cell is up.
        local mean = txn.f:be_conn(backend) / txn.f:nbsrv(backend)
        local part = cell.limit * #pool.cells / pool.limits -- 1 where all cells are alike
        if load * cell.limit >= math.ceil(pool.bound * mean * part) then return end
    end
    return load
end

-- The beginnings of the request's text in its scope, as numbers, and where each ends; noted for the cell, too.
local function scoped_prefixes(txn)
    local bytes, ends, hashes = (txn:get_var("txn.prefixes") or ""):match("^(%d+):([%d,]+):(%x+)$")
    if not bytes then return end
    local scope = txn.c:xxh64(txn:get_var("txn.cache_scope") or "", 0) & MASK
    local numbers, places, texts = {}, {}, {}
    for digits in hashes:gmatch(("%x"):rep(12)) do
        local number = tonumber(digits, 16) ~ scope
        numbers[#numbers + 1] = number
        texts[#texts + 1] = string.format("%012x", number)
    end
    for place in ends:gmatch("%d+") do places[#places + 1] = tonumber(place) end
    txn:set_var("txn.scoped_prefixes", bytes .. ":" .. ends .. ":" .. table.concat(texts))
    return numbers, places
end

-- The cell for which most of the text need not be read, less what each request there is worth, and how many bytes it has; of
-- equals `sticky`, the key's cell, if it may be used. Nothing where no cell has enough of it.
local function by_cache(txn, backend, pool, sticky, numbers, places)
    local best, has, score, most = nil, nil, -math.huge, 0
    for at = 1, #pool.cells do
        local cell = pool.cells[at]
        local here = places[cache_index.depth(cell.name, numbers)] or 0
        local load = bounded_load(txn, backend, pool, cell)
        if load then
            local worth = here - LOAD_BYTES * load * cell.limit
            most = math.max(most, here)
            if worth > score or (worth == score and cell == sticky) then best, has, score = cell, here, worth end
        end
    end
    if most >= WORTH_BYTES then return best, has end
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
    if not (cell and bounded_load(txn, backend, pool, cell)) then cell = nil end
    local numbers, places = scoped_prefixes(txn)
    if numbers and cache_index.is_fresh() then
        local found, bytes = by_cache(txn, backend, pool, cell, numbers, places)
        cell = found or cell or least_loaded(txn, backend, pool)
        local depth = cell and cache_index.depth(cell.name, numbers)
        if depth then txn:set_var("txn.matched", bytes or places[depth] or 0) end
    end
    cell = cell or least_loaded(txn, backend, pool)
    if cell then
        txn:set_var("txn.cell_server", cell.name)
        txn:set_var("txn.sticky_cell", cell.number)
    end
end

core.register_action("pick_cell", { "http-req" }, pick_cell)
