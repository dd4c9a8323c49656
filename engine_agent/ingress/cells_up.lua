-- The number of cells of a backend that can take requests now. HAProxy's `nbsrv` also counts the server no-cell when
-- there is none.

core.register_converters("cells_up", function(backend)
    local known = core.backends[backend]
    return known and known:get_srv_act() or 0
end)
