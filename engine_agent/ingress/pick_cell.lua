-- Picks the cell of a request. If cells report their caches: the one with most of its text, unless it is overloaded.
-- Otherwise, or if that is too little text: the last cell of its key, unless it is overloaded. Otherwise the least
-- loaded one with room. The picked cell becomes the sticky cell of the key. Without a picked cell, HAProxy takes the
-- cell with the fewest requests, or queues the request.
--
-- Overloaded means full, or above `load_bound` times its share of the requests, by concurrency. A lightly loaded cell
-- keeps its keys in any case, because a bound on the mean would forbid a second request at a cell while the pool is
-- nearly idle.
--
-- In: txn.cells, the value of the pool's entry in cells.map; the request, tracked as sc2 by its key, with its sticky
-- cell as gpt0; txn.prefixes, if the pool goes by caches; txn.cache_scope, which separates its blocks from others. Out:
-- txn.cell_server, the name of a server, and txn.sticky_cell, its number in the table; or nothing. txn.scoped_prefixes
-- and txn.matched, for the cell: the beginnings in its scope, and how many bytes of them the cell is expected to have.

local LIGHT_SHARE = 0.25 -- of a cell's concurrency: up to here it is not overloaded

local STATUS_AGE_S = 0.1
local WORTH_BYTES = 2048 -- a shorter text is read quickly, and many texts begin alike
local LOAD_BYTES = 8192   -- the cost of a request that a cell already has: 2,000 tokens, see docs/bench/caches.md
local MASK = 0xffffffffffff

local pools = {} -- backend -> its cells, parsed again when the text changes
local turn = 0   -- gives new keys to equally loaded cells in turn

-- FNV-1a: a cell has the same number in all threads and after a reload.
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

-- Whether its health check shows that it drains, at most STATUS_AGE_S ago: a query costs as much as a request.
local function drains_itself(backend, cell, server)
    local now = core.now()
    local now_s = now.sec + now.usec / 1e6
    if not cell.seen_s or now_s - cell.seen_s > STATUS_AGE_S then
        cell.seen_s, cell.stops = now_s, server:get_stats().status:sub(1, 4) == "NOLB"
    end
    return cell.stops
end

-- The share of the cell that is in use, or nil if it cannot take a request.
local function load_of(txn, backend, cell)
    local server = core.backends[backend].servers[cell.name]
    if not server or server:is_draining() or drains_itself(backend, cell, server) then return end
    local running = server:get_cur_sess()
    -- The ingresses of a region share the cell's places, so the server's limit can be below the table's.
    local limit = math.min(cell.limit, server:get_maxconn())
    if running < limit and txn.f:srv_is_up(backend .. "/" .. cell.name) then return running / cell.limit end
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

-- The share of a cell that is in use, or nil if it cannot take a request, or should not because of the load of the
-- others.
local function bounded_load(txn, backend, pool, cell)
    local load = load_of(txn, backend, cell)
    if load and load >= LIGHT_SHARE then
        -- be_conn includes this request; nbsrv is not 0, because this cell is up.
        local mean = txn.f:be_conn(backend) / txn.f:nbsrv(backend)
        local part = cell.limit * #pool.cells / pool.limits -- 1 if all cells are alike
        if load * cell.limit >= math.ceil(pool.bound * mean * part) then return end
    end
    return load
end

-- The beginnings of the request's text in its scope, as numbers, and their ends; also set for the cell.
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

-- The cell with the most cached text, minus the cost of each request there, and its cached bytes. Among equals,
-- `sticky`, the key's cell, if it may be used. Nil if no cell has enough of the text.
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
