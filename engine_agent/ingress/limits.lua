-- Limits of application keys: requests and tokens per minute, and requests at once. A limit of N per minute is a bucket
-- of N that fills at N a minute: N may come at once, and a response of "too many" states exactly when to retry. Tokens
-- are charged when the model is known, by an estimate, and settled when the completion ends, by what was really generated.
-- Requests are counted before anything of their body is read, so a body that is refused counts, too. Only requests of keys
-- with limits come here; it never routes, and what it knows is this process's own and gone with it.
--
-- In (admit_key): txn.key, the record of the key in its map; the request, tracked as sc0 by the key.
-- Out: of a request over a limit txn.refusal, as refuse.lua takes it; of every one txn.limited; of one whose tokens are to be
-- charged (charge_tokens) txn.charges.

local PREFIX, REQUESTS, TOKENS, CONCURRENT = 1, 5, 6, 7 -- places in the record; key_map.py has all of them
local BYTES_PER_TOKEN = 4     -- OpenAI's rule of thumb for English text
local INITIAL_ESTIMATE_TOKENS = 256 -- of a completion, until a key has had some
local WEIGHT = 0.2            -- of the newest completion in a key's mean
local TAIL_BYTES = 2048       -- `usage` with its details and the end of the stream
local SWEEP_S = 600

local accounts = {} -- prefix -> { requests = bucket, tokens = bucket, mean_tokens = of a completion }

local function now_s()
    local now = core.now()
    return now.sec + now.usec / 1e6
end

local function number(text)
    return tonumber(text) or 0
end

local function filled(bucket, limit, now)
    if not bucket then return { level = limit, at = now } end
    local passed_s = math.max(0, now - bucket.at)
    bucket.level = math.min(limit, bucket.level + passed_s * limit / 60)
    bucket.at = now
    return bucket
end

local function seconds_until(bucket, limit, level)
    return math.max(0, level - bucket.level) * 60 / limit
end

-- A duration as OpenAI's headers write it: 120ms, 7.5s, 6m0s.
local function duration(s)
    if s < 1 then return string.format("%dms", math.ceil(s * 1000)) end
    if s < 60 then return (string.format("%.3f", s):gsub("%.?0+$", "")) .. "s" end
    return string.format("%dm%ds", s // 60, math.ceil(s % 60))
end

local function keep_limit(txn, kind, bucket, limit)
    txn:set_var("txn.rl_limit_" .. kind, limit)
    txn:set_var("txn.rl_remaining_" .. kind, math.max(0, math.floor(bucket.level)))
    txn:set_var("txn.rl_reset_" .. kind, duration(seconds_until(bucket, limit, limit)))
end

local function refuse(txn, kind, retry_after_s, why)
    txn:set_var("txn.refusal_status", 429)
    txn:set_var("txn.refusal_retry_after_ms", math.max(1, math.ceil(retry_after_s * 1000)))
    txn:set_var("txn.refusal", string.format(
        '{"error":{"message":"Rate limit reached on %s","type":"%s","param":null,"code":"rate_limit_exceeded"}}',
        why, kind))
end

local function refuse_for_now(txn, kind, bucket, limit, wanted)
    local wait_s = seconds_until(bucket, limit, wanted)
    local used = math.max(0, math.ceil(limit - bucket.level))
    refuse(txn, kind, wait_s, string.format(
        "%s per min: Limit %d, Used %d, Requested %d. Please try again in %s.",
        kind, limit, used, math.ceil(wanted), duration(wait_s)))
end

-- Tokens of the prompt, and of the completion, whose length the request may bound.
local function estimate(txn, account)
    local bytes = math.max(number(txn.f:req_body_size()), number(txn.f:req_hdr_val("content-length")))
    local completion = account.mean_tokens or INITIAL_ESTIMATE_TOKENS
    local body = txn.sf:req_body()
    for _, name in ipairs({ "max_tokens", "max_completion_tokens" }) do
        local most = tonumber(body:match('"' .. name .. '"%s*:%s*(%d+)'))
        if most then completion = math.min(completion, most) end
    end
    return math.ceil(bytes / BYTES_PER_TOKEN), math.ceil(completion)
end

local function fields_of(record)
    local fields = {}
    for field in record:gmatch("[^|]+") do fields[#fields + 1] = field end
    return fields[PREFIX], number(fields[REQUESTS]), number(fields[TOKENS]), number(fields[CONCURRENT])
end

local function admit_key(txn)
    local prefix, rpm, tpm, concurrent = fields_of(txn:get_var("txn.key"))
    txn:set_var("txn.limited", 1)
    if concurrent > 0 and number(txn.f:sc0_conn_cur()) > concurrent then
        return refuse(txn, "concurrency", 1, string.format(
            "concurrent requests: Limit %d. Please try again when one has ended.", concurrent))
    end
    local account = accounts[prefix] or {}
    accounts[prefix] = account
    local now = now_s()
    account.requests = rpm > 0 and filled(account.requests, rpm, now) or nil
    account.tokens = tpm > 0 and filled(account.tokens, tpm, now) or nil
    if account.requests and account.requests.level < 1 then
        refuse_for_now(txn, "requests", account.requests, rpm, 1)
    elseif account.tokens and account.tokens.level < 1 then
        refuse_for_now(txn, "tokens", account.tokens, tpm, 1)
    elseif account.requests then
        account.requests.level = account.requests.level - 1
    end
    if account.requests then keep_limit(txn, "requests", account.requests, rpm) end
    if account.tokens then
        keep_limit(txn, "tokens", account.tokens, tpm)
        txn:set_var("txn.charges", 1)
    end
end

local function charge_tokens(txn)
    local prefix, _, tpm = fields_of(txn:get_var("txn.key"))
    local account = accounts[prefix]
    if not (account and account.tokens and tpm > 0) then return end
    account.tokens = filled(account.tokens, tpm, now_s())
    local prompt, completion = estimate(txn, account)
    -- One request may need more than a minute's tokens: it passes when all of them are there, and leaves a debt.
    local wanted = math.min(prompt + completion, tpm)
    if account.tokens.level < wanted then
        refuse_for_now(txn, "tokens", account.tokens, tpm, wanted)
    else
        account.tokens.level = account.tokens.level - prompt - completion
        txn:set_var("txn.charged_prompt", prompt)
        txn:set_var("txn.charged_completion", completion)
    end
    keep_limit(txn, "tokens", account.tokens, tpm)
end

-- Puts what was really used in the place of the estimate, once. `completion` nil: there was none, so nothing was used.
local function settle(txn, total, completion)
    local prompt, guessed = txn:get_var("txn.charged_prompt"), txn:get_var("txn.charged_completion")
    if not prompt then return end
    txn:unset_var("txn.charged_prompt")
    local account = accounts[txn:get_var("txn.key_prefix")]
    if not account then return end
    if account.tokens then account.tokens.level = account.tokens.level + prompt + guessed - total end
    if completion then
        local mean = account.mean_tokens or completion
        account.mean_tokens = mean + WEIGHT * (completion - mean)
    end
end

-- States in OpenAI's headers what is left, and gives back what a failed response was charged.
local function settle_key(txn)
    for _, kind in ipairs({ "requests", "tokens" }) do
        for _, what in ipairs({ "limit", "remaining", "reset" }) do
            local value = txn:get_var("txn.rl_" .. what .. "_" .. kind)
            if value then txn.http:res_set_header("x-ratelimit-" .. what .. "-" .. kind, tostring(value)) end
        end
    end
    if txn.f:status() >= 400 then settle(txn, 0, nil) end
end

local function last_match(text, pattern)
    local found
    for number in text:gmatch(pattern) do found = tonumber(number) end
    return found
end

-- Reads along the responses of requests that were charged for tokens, and no others.
local Meter = { id = "tokens of application keys", flags = filter.FLT_CFG_FL_HTX }
Meter.__index = Meter

function Meter:new()
    return setmetatable({ tail = "", events = 0 }, Meter)
end

function Meter:start_analyze(txn, channel)
    if channel:is_resp() and txn:get_var("txn.charged_prompt") then
        self.reads = true
        filter.register_data_filter(self, channel)
    end
end

function Meter:http_payload(_, message)
    local piece = message:body()
    if not piece or #piece == 0 then return end
    local _, ends = piece:gsub("\n\r?\n", "")
    self.events = self.events + ends
    self.tail = (self.tail .. piece):sub(-TAIL_BYTES)
end

function Meter:end_analyze(txn, channel)
    if not (self.reads and channel:is_resp()) then return end
    -- Text that a model writes cannot match: inside a JSON string the quotes are escaped.
    local total = last_match(self.tail, '"total_tokens":%s*(%d+)')
    local completion = last_match(self.tail, '"completion_tokens":%s*(%d+)') or self.events
    settle(txn, total or (txn:get_var("txn.charged_prompt") or 0) + completion, completion)
end

local function sweep()
    while true do
        core.sleep(SWEEP_S)
        local before = now_s() - SWEEP_S
        for prefix, account in pairs(accounts) do
            local last = math.max(account.requests and account.requests.at or 0, account.tokens and account.tokens.at or 0)
            if last < before and not (account.tokens and account.tokens.level < 0) then accounts[prefix] = nil end
        end
    end
end

core.register_filter("token_meter", Meter, function(meter) return meter end)
core.register_action("admit_key", { "http-req" }, admit_key)
core.register_action("charge_tokens", { "http-req" }, charge_tokens)
core.register_action("settle_key", { "http-res" }, settle_key)
core.register_task(sweep)
