-- The prefix caches of cells, per thread of HAProxy: sets of hashes of text beginnings, by the names of servers. The
-- agent sends them over a socket, first as a whole, then changes. While it is silent they do not count. `pick_cell.lua`
-- queries them.
--
-- Lines: `whole SERVER` (start a new list), `add SERVER HASHES`, `del SERVER HASHES`, `gone SERVER`, `tick`.

local SOCKET = "unix@cache-index.sock"
local SILENT_S = 3 -- the agent sends something each second
local RETRY_MS = 500
local DIGITS = ("%x"):rep(12)

local servers = {}
local heard_s = -math.huge

cache_index = {}

local function now_s()
    local now = core.now()
    return now.sec + now.usec / 1e6
end

local function take(line)
    local word, server, hashes = line:match("^(%a+) ?(%S*) ?(%x*)$")
    heard_s = now_s()
    if word == "whole" then servers[server] = {}
    elseif word == "gone" then servers[server] = nil
    elseif servers[server] and (word == "add" or word == "del") then
        local there = word == "add" or nil
        local set = servers[server]
        for digits in hashes:gmatch(DIGITS) do set[tonumber(digits, 16)] = there end
    end
end

core.register_task(function()
    while true do
        servers = {}
        local feed = core.tcp()
        feed:settimeout(SILENT_S)
        if feed:connect(SOCKET) then
            while true do
                local line = feed:receive("*l")
                if not line then break end
                take(line)
            end
        end
        feed:close()
        heard_s = -math.huge
        core.msleep(RETRY_MS)
    end
end)

function cache_index.is_fresh()
    return now_s() - heard_s < SILENT_S
end

-- The number of these beginnings, each longer than the one before, that a server has; nil if it has no list.
function cache_index.depth(server, hashes)
    local set = servers[server]
    if not set then return end
    local low, high = 0, #hashes
    while low < high do
        local middle = (low + high + 1) // 2
        if set[hashes[middle]] then low = middle else high = middle - 1 end
    end
    return low
end
