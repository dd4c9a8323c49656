-- How many cells of a backend can take requests now. HAProxy's own `nbsrv` counts the server no-cell, too, when
-- there is none.

core.register_converters("cells_up", function(backend)
    local known = core.backends[backend]
    return known and known:get_srv_act() or 0
end)
