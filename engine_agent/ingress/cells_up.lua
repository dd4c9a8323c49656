-- How many cells of a backend can take requests now. HAProxy's own `nbsrv` counts the server that stands in for them, too,
-- when there is none.

core.register_converters("cells_up", function(backend)
    local found = core.backends[backend]
    return found and found:get_srv_act() or 0
end)
