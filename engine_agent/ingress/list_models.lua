-- The models that a scoped key may see: those of its pools.
--
-- In: txn.key_prefix; txn.model, for a single model. Out: txn.listing, the body of GET /v1/models; for a single model
-- that the key does not open, txn.pool is unset.

local keys = Map.new("keys.map", Map._str)
local listing = Map.new("listing.map", Map._str)

local function opens(prefix, model)
    for pool in (listing:lookup("/" .. model) or ""):gmatch("%S+") do
        if keys:lookup(prefix .. "/" .. pool) then return true end
    end
    return false
end

local function list_models(txn)
    local prefix, wanted = txn:get_var("txn.key_prefix"), txn:get_var("txn.model")
    if wanted then
        if not opens(prefix, wanted) then txn:unset_var("txn.pool") end
        return
    end
    local shown = {}
    for entry in (listing:lookup("all") or ""):gmatch('{"id":[^}]*}') do
        if opens(prefix, entry:match('"id":"([^"]*)"')) then shown[#shown + 1] = entry end
    end
    txn:set_var("txn.listing", '{"object":"list","data":[' .. table.concat(shown, ",") .. "]}")
end

core.register_action("list_models", { "http-req" }, list_models)
