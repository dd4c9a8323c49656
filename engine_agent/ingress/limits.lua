-- Requests and tokens per minute of application keys. A limit of N is a bucket of N that fills at N a minute: N may come
-- at once, and an answer of "too many" says exactly when to come back. Tokens are charged at admission, by an estimate,
-- and settled when the answer ends, by what was really generated. Only requests of keys with such limits come here; it
-- never routes, and what it knows is this process's own and gone with it.
--
-- In (admit_key): txn.key_prefix, txn.key_rpm, txn.key_tpm, txn.prompt_bytes, txn.max_tokens (0: not given).
-- Out: txn.rl_* for the headers; of a refused request txn.refused_for, txn.refused_why and txn.refused_s.

local BYTES_PER_TOKEN = 4     -- OpenAI's rule of thumb for English text
local FIRST_GUESS_TOKENS = 256 -- of an answer, until a key has had some
local WEIGHT = 0.2            -- of the newest answer in a key's mean
local TAIL_BYTES = 2048       -- `usage` with its details and the end of the stream
local SWEEP_S = 600

local accounts = {} -- prefix -> { requests = bucket, tokens = bucket, mean_tokens = of an answer }

local function now_s()
    local now = core.now()
    return now.sec + now.usec / 1e6
end

local function number(txn, name)
    return tonumber(txn:get_var(name)) or 0
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

local function tell(txn, kind, bucket, limit)
    txn:set_var("txn.rl_limit_" .. kind, limit)
    txn:set_var("txn.rl_remaining_" .. kind, math.max(0, math.floor(bucket.level)))
    txn:set_var("txn.rl_reset_" .. kind, duration(seconds_until(bucket, limit, limit)))
end

local function refuse(txn, kind, bucket, limit, wanted)
    local wait_s = seconds_until(bucket, limit, wanted)
    local used = math.max(0, math.ceil(limit - bucket.level))
    txn:set_var("txn.refused_for", kind)
    txn:set_var("txn.refused_s", math.max(1, math.ceil(wait_s)))
    txn:set_var("txn.refused_why", string.format(
        "Rate limit reached on %s per min: Limit %d, Used %d, Requested %d. Please try again in %s.",
        kind, limit, used, math.ceil(wanted), duration(wait_s)))
end

local function estimate(txn, account)
    local prompt = math.ceil(number(txn, "txn.prompt_bytes") / BYTES_PER_TOKEN)
    local answer = account.mean_tokens or FIRST_GUESS_TOKENS
    local most = number(txn, "txn.max_tokens")
    if most > 0 then answer = math.min(answer, most) end
    return prompt, math.ceil(answer)
end

local function admit_key(txn)
    local prefix = txn:get_var("txn.key_prefix")
    local rpm, tpm = number(txn, "txn.key_rpm"), number(txn, "txn.key_tpm")
    local account = accounts[prefix] or {}
    accounts[prefix] = account
    local now = now_s()
    account.requests = rpm > 0 and filled(account.requests, rpm, now) or nil
    account.tokens = tpm > 0 and filled(account.tokens, tpm, now) or nil
    local prompt, answer = estimate(txn, account)
    -- One request may ask for more than a minute's tokens: it passes when all of them are there, and leaves a debt.
    local wanted = math.min(prompt + answer, tpm)
    if account.requests and account.requests.level < 1 then
        refuse(txn, "requests", account.requests, rpm, 1)
    elseif account.tokens and account.tokens.level < wanted then
        refuse(txn, "tokens", account.tokens, tpm, wanted)
    else
        if account.requests then account.requests.level = account.requests.level - 1 end
        if account.tokens then
            account.tokens.level = account.tokens.level - prompt - answer
            txn:set_var("txn.charged_prompt", prompt)
            txn:set_var("txn.charged_answer", answer)
        end
    end
    if account.requests then tell(txn, "requests", account.requests, rpm) end
    if account.tokens then tell(txn, "tokens", account.tokens, tpm) end
end

-- Puts what was really used in the place of the estimate, once. `answer` nil: there was none, so nothing was used.
local function settle(txn, total, answer)
    local prompt, guessed = txn:get_var("txn.charged_prompt"), txn:get_var("txn.charged_answer")
    if not prompt then return end
    txn:unset_var("txn.charged_prompt")
    local account = accounts[txn:get_var("txn.key_prefix")]
    if not account then return end
    if account.tokens then account.tokens.level = account.tokens.level + prompt + guessed - total end
    if answer then
        local mean = account.mean_tokens or answer
        account.mean_tokens = mean + WEIGHT * (answer - mean)
    end
end

local function settle_refused(txn)
    settle(txn, 0, nil)
end

local function last_match(text, pattern)
    local found
    for number in text:gmatch(pattern) do found = tonumber(number) end
    return found
end

-- Reads along the answers of requests that were charged for tokens, and no others.
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
    local answer = last_match(self.tail, '"completion_tokens":%s*(%d+)') or self.events
    settle(txn, total or (txn:get_var("txn.charged_prompt") or 0) + answer, answer)
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
core.register_action("settle_refused", { "http-res" }, settle_refused)
core.register_task(sweep)
