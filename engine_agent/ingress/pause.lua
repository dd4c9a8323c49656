-- Delays a request for so many milliseconds before it is sent again.

core.register_action("pause", { "http-req" }, function(_, ms) core.msleep(tonumber(ms)) end, 1)
