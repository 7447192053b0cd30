// Generation for many sequences at once. Each step is one call of the stack: a token of every
// sequence that decodes, and pieces of the prompts of those that do not yet. A sequence's tokens,
// states and log-probabilities have the same bits whatever else is in the batch, how its prompt was
// cut, what of it was found again, and however often it was preempted on the way. An engine is for
// weights that stay as they are, since pages are found by their tokens alone: after an update, make
// another.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "kernels/sampling.h"
#include "model/core/decode.h"

namespace fbt::model::engine {

// Why a sequence ended: max_tokens, a stop token, the context's end; cancelled; a log-probability
// that is no finite number; recorded states that are not what the model computes.
enum class Finish { length, stop, context, interrupted, overflow, mismatch };
std::string to_string(Finish finish);

struct Rollout {
    int prompt = 0, sample = 0;  // which prompt, which of its samples: the caller's numbers
    core::Mode mode = core::Mode::soft;
    std::vector<int32_t> tokens;  // the prompt's, then the sampled ones
    int prompt_length = 0;
    std::vector<double> logprobs;  // of each sampled token under the model (temperature 1)
    Finish finish = Finish::length;
    int mismatch = -1;  // the first position whose recorded state is another than the model's
    // Of every fed position, T = P+n-1 (the last token is never fed), where asked for, complete and
    // no mismatch: top states [T,D]; keys after RoPE and values, [L,T,G,C] each.
    std::vector<float> states, keys, values;
};

struct Request {
    std::vector<int32_t> tokens;  // the prompt's; of a rollout to go on with, all
    int prompt = 0;               // its number, copied into the rollout
    core::Mode mode = core::Mode::soft;
    kernels::Sampling sampling;
    // The draw of a token depends on these, on the number of the sample, which is added to
    // `stream`, and on how many were sampled before it.
    uint64_t seed = 1, stream = 0;
    int max_tokens = 200;  // sampled in all
    std::vector<int32_t> stop_tokens;
    bool keep_states = false, keep_cache = false;

    // To go on with a rollout: its tokens after the first prompt_length were sampled, with these
    // log-probabilities. Soft and fused ones need the states of all positions but the last, [T,D].
    // The engine's own must have the same bits, unless they are approximate, replayed from tokens:
    // those are only gone on from.
    int prompt_length = 0;  // 0: all tokens are the prompt's
    std::vector<double> logprobs;
    core::Tensor states;
    bool approximate = false;
};

struct EngineConfig {
    int sequences = 64;  // at once, at most; at least 1
    // Of a call, while prompts are in it: more than `sequences`, since decoding is never held back.
    int rows = 1024;
    // Of kKeyBlock positions each; 0: as many as there is use for. When they run out the youngest
    // sequence gives up its own, waits, and is rebuilt from its states in one pass.
    int pages = 0;
};

class Engine {
  public:
    explicit Engine(core::Model& model, const EngineConfig& config = {});

    // Queues so many samples of one request, which share the prompt's pages, and returns the first
    // one's id; the others' follow. Errors  usage when tokens are none, outside the vocabulary or
    // as many as the context, when settings of sampling cannot be, when what a rollout goes on from
    // does not fit its tokens, or when all pages together are too few for it.
    int64_t submit(const Request& request, int samples = 1);
    // Ends it as it is: what was sampled can be taken.
    void cancel(int64_t id);
    void cancel_all();

    struct Event {
        int64_t id;
        int32_t token;
        double logprob;
    };
    // One call of the stack and what is sampled from it, in the order of ids. Does nothing when
    // idle. The events are valid until the next step.
    const std::vector<Event>& step();
    bool idle() const { return running_.empty() && waiting_.empty(); }
    bool ended(int64_t id) const { return sequences_.at(id).stage == Stage::ended; }
    // Its tokens so far.
    const Rollout& rollout(int64_t id) const { return sequences_.at(id).rollout; }
    // Hands over one that has ended; the engine forgets it.
    Rollout take(int64_t id);

    struct Counts {
        int64_t steps = 0, rows = 0;  // calls of the stack, and positions computed in them
        int64_t reused = 0;           // positions found again, or shared with another sample
        int64_t preempted = 0;        // times that a sequence gave up its pages
        int64_t rebuilt = 0;          // positions computed from recorded states
    };
    const Counts& counts() const { return counts_; }
    const core::PagedStore& store() const { return decoder_.store(); }

  private:
    enum class Stage { waiting, running, ended };
    struct Sequence {
        Rollout rollout;
        Request request;  // tokens and log-probabilities are in the rollout
        int64_t leader;   // whose prompt it shares: of several samples the first
        Stage stage = Stage::waiting;
        int decoder = -1;          // its id there, while it runs
        int fed = 0;               // positions whose keys, values and states are in the store
        bool second_pass = false;  // of a fused prompt
        core::Tensor carried;      // then: pass 1's states of positions [0, P-1)
        core::Tensor recorded;     // to be rebuilt: the states of all tokens but the last
        int published = 0;         // pages
        int P() const { return rollout.prompt_length; }
        int size() const { return int(rollout.tokens.size()); }
        bool fused_prompt() const { return rollout.mode == core::Mode::fused && P() > 1; }
        // Positions that the next call goes on to, at most.
        int target() const { return fused_prompt() && !second_pass ? P() : size(); }
        bool prompt_done() const { return fed >= P() && (second_pass || !fused_prompt()); }
    };

    void admit();
    bool start(Sequence& s);  // false: not enough pages now
    std::vector<core::Feed> plan(std::vector<int64_t>& ids);
    core::Feed feed_of(const Sequence& s, int end) const;
    void preempt(int64_t id);
    void advance(Sequence& s, int end);
    void check_rebuilt(int64_t id, Sequence& s);
    void sample(const std::vector<int64_t>& ids);
    void end(int64_t id, Sequence& s, Finish finish);

    core::Model& model_;
    EngineConfig config_;
    core::Decoder decoder_;
    std::map<int64_t, Sequence> sequences_;
    std::set<int64_t> waiting_, running_;  // the smaller the id, the older
    int64_t next_id_ = 0;
    std::vector<Event> events_;
    Counts counts_;
};

}  // namespace fbt::model::engine
