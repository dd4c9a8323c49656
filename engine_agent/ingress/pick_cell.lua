-- Finds the cell of a request's key: on a ring of the pool's cells, the first from the key on that is not overloaded. It
-- notes a name, or none; HAProxy then goes there, or to the cell with the fewest requests, or queues for all of them.
--
-- Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam 2018), with two differences. HAProxy's own
-- (`hash-balance-factor`) queues for one cell while others are idle; here a full cell is passed over, so that all wait in
-- the pool's one queue. And a cell that is lightly loaded keeps its keys whatever the others do, because a bound on the
-- mean forbids a second request at a cell while the pool is nearly idle.
--
-- In: txn.affinity, a number; txn.ring, the value of the pool's entry in rings.map. Out: txn.cell_server, or nothing.

local POINTS = 64        -- of each cell on the ring: keys are spread within about 1/8 of even
local LIGHT_SHARE = 0.25 -- of what a cell runs at once: up to here it is not overloaded

local rings = {} -- backend -> its ring, built anew when the text changes

local function hash(text)
    local h = 2166136261 -- FNV-1a
    for at = 1, #text do h = ((h ~ text:byte(at)) * 16777619) & 0xffffffff end
    h = ((h ~ (h >> 16)) * 0x7feb352d) & 0xffffffff
    h = ((h ~ (h >> 15)) * 0x846ca68b) & 0xffffffff
    return h ~ (h >> 16)
end

local function build(text)
    local bound, cells = text:match("^(%d+) (.*)$")
    local ring = { text = text, bound = tonumber(bound) / 100, cells = {}, places = {}, owners = {} }
    local points = {}
    for name, limit in cells:gmatch("([^,:]+):(%d+)") do
        ring.cells[#ring.cells + 1] = { name = name, limit = tonumber(limit) }
        for point = 1, POINTS do points[#points + 1] = { hash(name .. "/" .. point), #ring.cells } end
    end
    table.sort(points, function(one, other)
        if one[1] ~= other[1] then return one[1] < other[1] end
        return one[2] < other[2]
    end)
    for at, point in ipairs(points) do ring.places[at], ring.owners[at] = point[1], point[2] end
    return ring
end

-- Returns the index of the first place at or after `key`.
local function first_from(places, key)
    local low, high = 1, #places + 1
    while low < high do
        local middle = (low + high) // 2
        if places[middle] < key then low = middle + 1 else high = middle end
    end
    return low
end

local function has_room(txn, backend, cell, mean_bound)
    local server = core.backends[backend].servers[cell.name]
    if not server or server:is_draining() then return false end
    local most = math.min(cell.limit, math.max(mean_bound, math.ceil(LIGHT_SHARE * cell.limit)))
    return server:get_cur_sess() < most and txn.f:srv_is_up(backend .. "/" .. cell.name)
end

local function pick_cell(txn)
    local backend, text = txn:get_var("txn.pool"), txn:get_var("txn.ring")
    local ring = rings[backend]
    if not text then return end
    if not ring or ring.text ~= text then
        ring = build(text)
        rings[backend] = ring
    end
    local usable = txn.f:nbsrv(backend)
    if usable == 0 or #ring.cells == 0 then return end
    local mean_bound = math.ceil(ring.bound * txn.f:be_conn(backend) / usable) -- be_conn counts this request, too
    local start = first_from(ring.places, hash(tostring(txn:get_var("txn.affinity"))))
    local asked, left = {}, #ring.cells
    for step = 0, #ring.places - 1 do
        local owner = ring.owners[(start + step - 1) % #ring.places + 1]
        if not asked[owner] then
            if has_room(txn, backend, ring.cells[owner], mean_bound) then
                txn:set_var("txn.cell_server", ring.cells[owner].name)
                return
            end
            asked[owner] = true
            left = left - 1
            if left == 0 then return end
        end
    end
end

core.register_action("pick_cell", { "http-req" }, pick_cell)
