#include "model/engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/philox.h"

namespace fbt::model::engine {

using core::Feed;
using core::Mode;
using core::PagedStore;
using kernels::kKeyBlock;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;

std::string to_string(Finish finish) {
    switch (finish) {
        case Finish::length:
            return "length";
        case Finish::stop:
            return "stop";
        case Finish::context:
            return "context";
        case Finish::interrupted:
            return "interrupted";
        case Finish::overflow:
            return "overflow";
        case Finish::mismatch:
            return "mismatch";
    }
    return "?";
}

namespace {

// The first row where two tensors of one shape differ in any bit; -1: none.
int first_different_row(const Tensor& a, const Tensor& b) {
    const std::vector<double> x = a.to_double(), y = b.to_double();  // which holds every dtype
    for (size_t i = 0; i < x.size(); ++i)
        if (std::memcmp(&x[i], &y[i], sizeof x[i]) != 0) return int(int64_t(i) / a.dim(1));
    return -1;
}

}  // namespace

Engine::Engine(core::Model& model, const EngineConfig& config)
    : model_(model), config_(config), decoder_(model, Mode::soft, config.pages) {
    if (config.sequences < 1 || config.pages < 0)
        throw Error(ErrorKind::usage, "an engine of " + std::to_string(config.sequences) +
                                          " sequences and " + std::to_string(config.pages) +
                                          " pages; needed at least 1 and 0");
    config_.rows = std::max(config.rows, config.sequences + 1);
}

int64_t Engine::submit(const Request& request, int samples) {
    const core::Config& model = model_.config();
    const std::string which = "prompt " + std::to_string(request.prompt + 1);
    const auto refuse = [&](const std::string& what) {
        throw Error(ErrorKind::usage, which + what);
    };
    const int size = int(request.tokens.size());
    const int P = request.prompt_length == 0 ? size : request.prompt_length;
    if (size == 0) refuse(" is empty");
    for (int32_t token : request.tokens)
        if (token < 0 || token >= model.vocab_size)
            refuse(" holds token " + std::to_string(token) + ", outside the vocabulary of " +
                   std::to_string(model.vocab_size));
    if (size >= model.context)
        refuse(" has " + std::to_string(size) + " tokens, but the context is " +
               std::to_string(model.context) + ": shorten it to leave room for the response");
    if (P < 1 || P > size || int(request.logprobs.size()) != size - P)
        refuse(": " + std::to_string(size) + " tokens with a prompt of " + std::to_string(P) +
               " need " + std::to_string(size - P) + " log-probabilities, got " +
               std::to_string(request.logprobs.size()));
    if (const kernels::Status bad =
            kernels::sample_arguments(&request.sampling, 1, model.vocab_size);
        bad.code != kernels::Code::ok)
        refuse(": " + std::string(bad.message));
    const bool has_states = request.states.defined();
    if (has_states ? request.states.shape() != tensor::Shape({size - 1, model.dim}) ||
                         request.states.dtype() != model_.dtype()
                   : size > P + 1 && request.mode != Mode::standard)
        refuse(": to go on with a " + to_string(request.mode) + " rollout needs its " +
               std::to_string(size - 1) + " states of " + std::to_string(model.dim) + " " +
               tensor::name_of(model_.dtype()));
    const int64_t longest =
        std::min<int64_t>(int64_t(P) + std::max(request.max_tokens, 1), model.context) - 1;
    const int64_t pages = (std::max<int64_t>(longest, size) + kKeyBlock - 1) / kKeyBlock;
    if (config_.pages > 0 && pages > config_.pages)
        refuse(": a sequence of up to " + std::to_string(longest) + " positions needs " +
               std::to_string(pages) + " pages of " + std::to_string(kKeyBlock) + ", but all are " +
               std::to_string(config_.pages) + ": allow more, or fewer tokens");

    const int64_t first = next_id_;
    for (int i = 0; i < samples; ++i) {
        Sequence s;
        s.request = request;
        s.request.tokens.clear();
        s.request.logprobs.clear();
        s.request.stream += uint64_t(i);
        s.rollout.prompt = request.prompt;
        s.rollout.sample = i;
        s.rollout.mode = request.mode;
        s.rollout.tokens = request.tokens;
        s.rollout.prompt_length = P;
        s.rollout.logprobs = request.logprobs;
        s.leader = first;
        s.recorded = request.states;
        waiting_.insert(next_id_);
        sequences_.emplace(next_id_++, std::move(s));
    }
    return first;
}

void Engine::cancel(int64_t id) {
    Sequence& s = sequences_.at(id);
    if (s.stage != Stage::ended) end(id, s, Finish::interrupted);
}

void Engine::cancel_all() {
    for (auto& [id, s] : sequences_)
        if (s.stage != Stage::ended) end(id, s, Finish::interrupted);
}

Rollout Engine::take(int64_t id) {
    const auto at = sequences_.find(id);
    if (at == sequences_.end() || at->second.stage != Stage::ended)
        throw Error(ErrorKind::internal, "sequence " + std::to_string(id) + " has not ended");
    Rollout rollout = std::move(at->second.rollout);
    sequences_.erase(at);
    return rollout;
}

// In the order of arrival; who does not fit keeps all behind it waiting, or it might never fit.
void Engine::admit() {
    for (auto at = waiting_.begin();
         at != waiting_.end() && int(running_.size()) < config_.sequences;) {
        const int64_t id = *at;
        Sequence& s = sequences_.at(id);
        // A sample waits for the first one's prompt, if that is on its way.
        const auto leader = sequences_.find(s.leader);
        const bool shares = s.leader != id && leader != sequences_.end() &&
                            leader->second.stage == Stage::running && s.size() == s.P() &&
                            !s.recorded.defined();  // those it must compute itself, to compare
        if (shares && !leader->second.prompt_done()) {
            ++at;
            continue;
        }
        const int free = decoder_.store().available() - int(running_.size());
        if (shares && (free > 0 || running_.empty())) {
            s.decoder = decoder_.fork(leader->second.decoder, s.P());
            s.fed = s.P();
            s.second_pass = leader->second.second_pass;
            s.published = std::min(leader->second.published, s.P() / kKeyBlock);
            counts_.reused += s.P();
        } else if (shares || !start(s)) {
            break;
        }
        s.stage = Stage::running;
        running_.insert(id);
        at = waiting_.erase(at);
    }
}

// With the pages of its plain beginning that are there already; the last position is computed in
// any case, since the next token is drawn from its state.
bool Engine::start(Sequence& s) {
    PagedStore::Pages found;
    const int plain = s.rollout.mode == Mode::standard ? s.size()
                      : s.rollout.mode == Mode::soft   ? s.P()
                                                       : 0;
    if (plain > 0) found = decoder_.store().find(s.rollout.tokens, std::min(plain, s.size() - 1));
    const int needed = (s.size() + kKeyBlock) / kKeyBlock - int(found.size());
    if (!running_.empty() && needed > decoder_.store().available() - int(running_.size())) {
        decoder_.store().release(found);
        return false;
    }
    s.published = int(found.size());
    s.decoder = decoder_.add(std::move(found));
    s.fed = decoder_.length(s.decoder);
    s.second_pass = false;
    counts_.reused += s.fed;
    return true;
}

void Engine::preempt(int64_t id) {
    Sequence& s = sequences_.at(id);
    ++counts_.preempted;
    // What was being rebuilt is recorded already, and further than it has got.
    const bool recurrent = s.rollout.mode != Mode::standard && s.size() > s.P();
    if ((recurrent || s.request.keep_states) && !s.recorded.defined() && s.prompt_done()) {
        s.recorded = decoder_.store().read_states(decoder_.pages(s.decoder), 0, s.fed);
        // What approximate states gave is not what they were: from its own it would be another.
        if (s.request.approximate)
            s.recorded.rows(0, s.request.states.dim(0)).copy_from(s.request.states);
    }
    decoder_.drop(s.decoder);
    s.decoder = -1;
    s.carried = {};
    s.fed = 0;
    s.second_pass = false;
    s.stage = Stage::waiting;
    running_.erase(id);
    waiting_.insert(id);
}

// The sequence's positions [fed, end).
Feed Engine::feed_of(const Sequence& s, int end) const {
    Feed feed{s.decoder,
              s.fed,
              std::span(s.rollout.tokens).subspan(size_t(s.fed), size_t(end - s.fed)),
              s.P(),
              {}};
    if (s.rollout.mode == Mode::standard) feed.plain_end = end;
    if (s.second_pass && s.fed < s.P()) {
        feed.plain_end = 0;
        feed.carried = s.carried.rows(s.fed - 1, end - s.fed);
    } else if (const int first = std::max(s.fed, s.P());
               s.recorded.defined() && s.rollout.mode != Mode::standard && end > first) {
        feed.carried = s.recorded.rows(first - 1, end - first);
    }
    return feed;
}

// The oldest go first, both to rows and to pages: what is missing the youngest give up.
std::vector<Feed> Engine::plan(std::vector<int64_t>& ids) {
    int rows = config_.rows;
    for (int64_t id : running_) {
        const Sequence& s = sequences_.at(id);
        rows -= s.target() - s.fed == 1;
    }
    std::vector<Feed> feeds;
    int promised = 0;
    for (auto at = running_.begin(); at != running_.end();) {
        const int64_t id = *at++;
        const Sequence& s = sequences_.at(id);
        // The states before the response come from another record than those before a fused
        // prompt's second pass, or from none but the prompt's own.
        const bool cut = s.fed < s.P() && (s.second_pass || !s.recorded.defined());
        int end = cut ? s.P() : s.target();
        if (end - s.fed > 1) {
            end = std::min(end, s.fed + std::max(rows, feeds.empty() ? 1 : 0));
            rows -= end - s.fed;
        }
        if (end == s.fed) continue;
        const PagedStore& store = decoder_.store();
        const int needed = store.needed(decoder_.pages(s.decoder), s.fed, end);
        while (promised + needed > store.available() && *running_.rbegin() != id)
            preempt(*running_.rbegin());
        at = running_.upper_bound(id);
        if (promised + needed > store.available()) {
            preempt(id);
            break;
        }
        promised += needed;
        ids.push_back(id);
        feeds.push_back(feed_of(s, end));
    }
    return feeds;
}

void Engine::advance(Sequence& s, int end) {
    if (s.recorded.defined() && end > s.P()) counts_.rebuilt += end - std::max(s.fed, s.P());
    s.fed = end;
    if (s.fused_prompt() && !s.second_pass && s.fed == s.P()) {
        s.carried = decoder_.store().read_states(decoder_.pages(s.decoder), 0, s.P() - 1);
        s.second_pass = true;
        s.fed = 1;
        return;
    }
    if (s.second_pass && s.fed >= s.P()) s.carried = {};
    if (s.rollout.mode == Mode::fused) return;
    const int plain = s.rollout.mode == Mode::standard ? s.fed : std::min(s.fed, s.P());
    if (plain / kKeyBlock > s.published) {
        decoder_.store().publish(decoder_.pages(s.decoder), s.rollout.tokens, s.published, plain);
        s.published = plain / kKeyBlock;
    }
}

// The certificate: states that were recorded and then rebuilt have the same bits, all that are not
// approximate.
void Engine::check_rebuilt(int64_t id, Sequence& s) {
    const Tensor recorded = std::move(s.recorded);
    s.recorded = {};
    const int first = s.request.approximate ? int(s.request.states.dim(0)) : 0;
    const int count = int(recorded.dim(0)) - first;
    const int row = first_different_row(
        recorded.rows(first, count),
        decoder_.store().read_states(decoder_.pages(s.decoder), first, first + count));
    if (row < 0) return;
    s.rollout.mismatch = first + row;
    end(id, s, Finish::mismatch);
}

void Engine::sample(const std::vector<int64_t>& ids) {
    std::vector<int> rows;
    std::vector<kernels::Sampling> settings;
    std::vector<float> uniform;
    for (int64_t id : ids) {
        const Sequence& s = sequences_.at(id);
        rows.push_back(s.decoder);
        settings.push_back(s.request.sampling);
        const auto key = kernels::philox_key(s.request.seed, kernels::Draw::sampling);
        uniform.push_back(kernels::uniform_float(
            kernels::philox_bits(key, s.request.stream, uint32_t(s.rollout.logprobs.size()))));
    }
    const Tensor logits = model_.logits(decoder_.states(rows));
    const std::vector<int32_t> tokens = tensor::sample(logits, settings, uniform);
    const std::vector<double> logprobs = core::log_probabilities(logits, tokens);
    for (size_t i = 0; i < ids.size(); ++i) {
        Sequence& s = sequences_.at(ids[i]);
        if (!std::isfinite(logprobs[i])) {
            end(ids[i], s, Finish::overflow);
            continue;
        }
        Rollout& r = s.rollout;
        r.tokens.push_back(tokens[i]);
        r.logprobs.push_back(logprobs[i]);
        events_.push_back({ids[i], tokens[i], logprobs[i]});
        const std::vector<int32_t>& stop = s.request.stop_tokens;
        if (std::find(stop.begin(), stop.end(), tokens[i]) != stop.end())
            end(ids[i], s, Finish::stop);
        else if (int(r.logprobs.size()) >= s.request.max_tokens)
            end(ids[i], s, Finish::length);
        else if (s.size() >= model_.config().context)
            end(ids[i], s, Finish::context);
    }
}

const std::vector<Engine::Event>& Engine::step() {
    events_.clear();
    admit();
    std::vector<int64_t> ids;
    const std::vector<Feed> feeds = plan(ids);
    if (!feeds.empty()) {
        decoder_.feed(feeds);
        ++counts_.steps;
    }
    for (size_t i = 0; i < feeds.size(); ++i) {
        Sequence& s = sequences_.at(ids[i]);
        counts_.rows += int64_t(feeds[i].tokens.size());
        advance(s, feeds[i].first + int(feeds[i].tokens.size()));
        if (s.recorded.defined() && s.prompt_done() && s.fed == s.size()) check_rebuilt(ids[i], s);
    }
    admit();  // samples whose prompt is there now: their first tokens come together
    ids.clear();
    for (auto at = running_.begin(); at != running_.end();) {
        const int64_t id = *at++;
        Sequence& s = sequences_.at(id);
        if (s.fed < s.size() || !s.prompt_done()) continue;
        if (int(s.rollout.logprobs.size()) >= s.request.max_tokens)
            end(id, s, Finish::length);
        else
            ids.push_back(id);
    }
    if (!ids.empty()) sample(ids);
    return events_;
}

void Engine::end(int64_t id, Sequence& s, Finish finish) {
    Rollout& r = s.rollout;
    r.finish = finish;
    const int T = std::max(s.P(), s.size() - 1);
    const PagedStore& store = decoder_.store();
    const bool complete = s.decoder >= 0 && s.prompt_done() && s.fed >= T &&
                          finish != Finish::mismatch;  // whose states nobody vouches for
    const auto values = [](const Tensor& t) {
        const std::vector<double> x = t.to_double();
        return std::vector<float>(x.begin(), x.end());
    };
    if (s.request.keep_states && complete)
        r.states = values(store.read_states(decoder_.pages(s.decoder), 0, T));
    else if (s.request.keep_states && s.recorded.defined() && s.recorded.dim(0) == T &&
             !s.request.approximate)
        r.states = values(s.recorded);
    if (s.request.keep_cache && complete)
        for (int l = 0; l < model_.config().layers; ++l) {
            const auto append = [&](std::vector<float>& to, const Tensor& t) {
                const std::vector<float> layer = values(t);
                to.insert(to.end(), layer.begin(), layer.end());
            };
            append(r.keys, store.read_keys(decoder_.pages(s.decoder), l, 0, T));
            append(r.values, store.read_values(decoder_.pages(s.decoder), l, 0, T));
        }
    if (s.decoder >= 0) decoder_.drop(s.decoder);
    s.decoder = -1;
    s.recorded = s.carried = {};
    s.request.states = {};
    s.stage = Stage::ended;
    running_.erase(id);
    waiting_.erase(id);
}

}  // namespace fbt::model::engine
