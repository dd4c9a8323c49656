-- Lets a request wait for so many milliseconds before it is sent again. It never routes.

core.register_action("pause", { "http-req" }, function(_, ms) core.msleep(tonumber(ms)) end, 1)
