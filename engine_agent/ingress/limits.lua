-- Limits of application keys: requests and tokens per minute, and concurrent requests. A limit of N per minute is a
-- bucket of N that fills at N a minute: N may come together, and an error states exactly when to retry. Tokens are
-- charged by an estimate when the model is known, and settled by the generated tokens at the end. Requests are counted
-- before their body is read, so refused bodies count. Only requests of keys with limits run this script. Its state
-- belongs to the process and is lost with it.
--
-- In (admit_key): txn.key, the record of the key in its map; the request, tracked as sc0 by the key. txn.is_counted: an
-- ingress has counted it, so only its tokens count here (haproxy.cfg.j2). Out: txn.refusal for refuse.lua, if it is
-- over a limit; txn.limited; txn.charges, if charge_tokens has to charge its tokens.

local PREFIX, REQUESTS, TOKENS, CONCURRENT = 1, 5, 6, 7 -- places in the record, see key_map.py
local BYTES_PER_TOKEN = 4     -- OpenAI's rule of thumb for English text
local INITIAL_ESTIMATE_TOKENS = 256 -- of a completion, until a key has had some
local MOST_ANSWERS = 1024      -- of one request; no deployment allows more
local WEIGHT = 0.2            -- of the newest completion in a key's mean
local MAX_HELD_BYTES = 65536  -- of an event, and of a body that is not a stream; longer ones are not parsed
local PROMPT_HEADER, COMPLETION_HEADER = "x-switchyard-prompt-tokens", "x-switchyard-completion-tokens"
local ESCAPE = 92             -- a backslash
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

-- A duration in the format of OpenAI's headers: 120ms, 7.5s, 6m0s.
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

-- Estimates the tokens of the prompt, and of the completions, whose length and number the request can state.
local function estimate(txn, account)
    local bytes = math.max(number(txn.f:req_body_size()), number(txn.f:req_hdr_val("content-length")))
    local completion = account.mean_tokens or INITIAL_ESTIMATE_TOKENS
    local body = txn.sf:req_body()
    for _, name in ipairs({ "max_tokens", "max_completion_tokens" }) do
        local most = tonumber(body:match('"' .. name .. '"%s*:%s*(%d+)'))
        if most then completion = math.min(completion, most) end
    end
    local answers = 1
    for _, name in ipairs({ "n", "best_of" }) do
        answers = math.max(answers, tonumber(body:match('"' .. name .. '"%s*:%s*"?(%d+)')) or 1)
    end
    completion = completion * math.min(answers, MOST_ANSWERS)
    return math.ceil(bytes / BYTES_PER_TOKEN), math.ceil(completion)
end

local function fields_of(record)
    local fields = {}
    for field in record:gmatch("[^|]+") do fields[#fields + 1] = field end
    return fields[PREFIX], number(fields[REQUESTS]), number(fields[TOKENS]), number(fields[CONCURRENT])
end

local function admit_key(txn)
    local prefix, rpm, tpm, concurrent = fields_of(txn:get_var("txn.key"))
    local is_counted = txn:get_var("txn.is_counted")
    txn:set_var("txn.limited", 1)
    if not is_counted and concurrent > 0 and number(txn.f:sc0_conn_cur()) > concurrent then
        return refuse(txn, "concurrency", 1, string.format(
            "concurrent requests: Limit %d. Please try again when one has ended.", concurrent))
    end
    local account = accounts[prefix] or {}
    accounts[prefix] = account
    local now = now_s()
    account.requests = rpm > 0 and filled(account.requests, rpm, now) or nil
    account.tokens = tpm > 0 and filled(account.tokens, tpm, now) or nil
    if account.requests and not is_counted and account.requests.level < 1 then
        refuse_for_now(txn, "requests", account.requests, rpm, 1)
    elseif account.tokens and account.tokens.level < 1 then
        refuse_for_now(txn, "tokens", account.tokens, tpm, 1)
    elseif account.requests and not is_counted then
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
    -- One request can need more than a minute's tokens: it passes when the bucket is full, and leaves a debt.
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

-- Replaces the estimate by the used tokens, once. `completion` nil: there was none, so nothing was used.
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

-- Returns a request to its limit: it was accepted for later, and counts when it is sent.
local function uncount(txn)
    local prefix, rpm = fields_of(txn:get_var("txn.key"))
    local account = accounts[prefix]
    if not (account and account.requests) then return end
    account.requests.level = math.min(rpm, account.requests.level + 1)
end

-- Sets OpenAI's headers for the rest of the limits, and settles known usage: 0 for a failed response and for tokens
-- that were charged elsewhere; the cell's counts for a complete response; the cell's prompt tokens for a stream.
local function settle_key(txn)
    for _, kind in ipairs({ "requests", "tokens" }) do
        for _, what in ipairs({ "limit", "remaining", "reset" }) do
            local value = txn:get_var("txn.rl_" .. what .. "_" .. kind)
            if value then txn.http:res_set_header("x-ratelimit-" .. what .. "-" .. kind, tostring(value)) end
        end
    end
    local stored_as = txn:get_var("txn.stored_as")
    if stored_as == "later" then uncount(txn) end
    if not txn:get_var("txn.charged_prompt") then return end
    local prompt, completion = tonumber(txn.f:res_hdr(PROMPT_HEADER)), tonumber(txn.f:res_hdr(COMPLETION_HEADER))
    if stored_as or txn.f:status() >= 400 then
        settle(txn, 0, nil)
    elseif prompt and completion then
        settle(txn, prompt + completion, completion)
    elseif prompt then
        txn:set_var("txn.told_prompt", prompt)
    end
end

-- The text of an object that is a top-level member of a JSON object; nil if there is none. Text of models and clients
-- is inside strings or deeper, so it cannot match.
local function member(text, name)
    local depth, at, begins, key, is_key = 0, 1, nil, nil, false
    while true do
        at = text:find('[{}%[%]",]', at)
        if not at then return nil end
        local sign = text:sub(at, at)
        if sign == '"' then
            local first = at
            repeat
                at = text:find('["\\]', at + 1)
                if not at then return nil end
                local is_escape = text:byte(at) == ESCAPE
                if is_escape then at = at + 1 end
            until not is_escape
            if is_key then key, is_key = text:sub(first + 1, at - 1), false end
        elseif sign == "{" or sign == "[" then
            depth = depth + 1
            if depth == 2 and key == name and sign == "{" then begins = at end
            is_key = depth == 1 and sign == "{"
        elseif sign == "," then
            is_key = depth == 1
            if is_key then key = nil end
        else
            depth = depth - 1
            if begins and depth == 1 then return text:sub(begins, at) end
            if depth < 1 then return nil end
        end
        at = at + 1
    end
end

local function count(usage, name)
    return tonumber(usage:match('"' .. name .. '"%s*:%s*(%d+)'))
end

-- Reads the responses of requests that were charged for tokens.
local Meter = { id = "tokens of application keys", flags = filter.FLT_CFG_FL_HTX }
Meter.__index = Meter

function Meter:new()
    return setmetatable({ held = "", events = 0 }, Meter)
end

function Meter:start_analyze(txn, channel)
    if channel:is_resp() and txn:get_var("txn.charged_prompt") then
        self.reads = true
        filter.register_data_filter(self, channel)
    end
end

-- Usage is in the places of OpenAI's completions, its responses and Anthropic's messages; the last one counts.
function Meter:read(data)
    local usage = member(data, "usage")
    for _, around in ipairs({ "response", "message" }) do
        local inner = not usage and member(data, around)
        usage = usage or (inner and member(inner, "usage"))
    end
    if not usage then return end
    local input = count(usage, "input_tokens")
    local of_caches = (count(usage, "cache_read_input_tokens") or 0) + (count(usage, "cache_creation_input_tokens") or 0)
    self.prompt = count(usage, "prompt_tokens") or (input and input + of_caches) or self.prompt
    self.completion = count(usage, "completion_tokens") or count(usage, "output_tokens") or self.completion
end

function Meter:http_payload(_, message)
    local piece = message:body()
    if not piece or #piece == 0 then return end
    local text, at = self.held .. piece, 1
    while true do
        local stop, last = text:find("\n\r?\n", at)
        if not stop then break end
        self.events = self.events + 1
        local event = text:sub(at, stop)
        if event:find('"usage"', 1, true) then self:read(event:match("data:(.*)") or "") end
        at = last + 1
    end
    self.held = text:sub(at)
    if #self.held > MAX_HELD_BYTES then self.held, self.is_long = "", true end
end

-- A stream that was cut before its usage is settled by its events; a body that is too long to parse, by the estimate.
function Meter:end_analyze(txn, channel)
    if not (self.reads and channel:is_resp()) then return end
    if self.events == 0 and not self.is_long then self:read(self.held) end
    local prompt = self.prompt or txn:get_var("txn.told_prompt") or txn:get_var("txn.charged_prompt") or 0
    local guessed = self.is_long and txn:get_var("txn.charged_completion")
    local completion = self.completion or guessed or self.events
    settle(txn, prompt + completion, completion)
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
