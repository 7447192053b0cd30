#include "apps/experiment.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <thread>

#include "apps/corpus.h"
#include "model/core/checkpoint.h"
#include "tensor/file.h"

namespace fbt::apps {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

// Thrown by check_stop(); run() turns it into the exit code of a stopped command.
struct Stopped {};

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

struct Known {
    const char* name;
    const char* what;
    bool text;  // trains on --data
    void (*run)(Experiment&);
};
constexpr Known kExperiments[] = {
    {"state", "state tracking: one, two, three, scheduled and random passes", false,
     state_experiment},
    {"stability", "1 to 1,000 passes after the paper's schedules and two more", true,
     stability_experiment},
    {"replay", "errors of replay against passes, and from recorded states", true,
     replay_experiment},
    {"gates", "the three fusions on one recipe", true, gates_experiment},
    {"schedules", "pass 1 against pass 2 over a training, and what mends a late switch", true,
     schedules_experiment},
    {"probing", "what linear probes read at every depth", false, probing_experiment},
};

// A program's argument as a shell would take it.
std::string quoted(const std::string& argument) {
    const bool plain = !argument.empty() && argument.find_first_not_of(
                                                "abcdefghijklmnopqrstuvwxyz"
                                                "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
                                                "-_./:,+@=") == std::string::npos;
    if (plain) return argument;
    std::string out = "'";
    for (char c : argument) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

// `fbt ARGUMENTS` as a process of its own, all it prints going into a log. It stops with us: a
// request to stop is passed on by stop(), and should we be killed the system asks it to.
class Child {
  public:
    Child(const std::string& program, const std::vector<std::string>& arguments,
          const std::string& log) {
        std::vector<std::string> texts = {"fbt"};
        texts.insert(texts.end(), arguments.begin(), arguments.end());
        std::vector<char*> argv;
        for (std::string& text : texts) argv.push_back(text.data());
        argv.push_back(nullptr);
        signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how a child ended
        const int input = open("/dev/null", O_RDONLY | O_CLOEXEC);
        const int output = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
        if (output < 0)
            throw Error(ErrorKind::environment,
                        "cannot write " + log + ": " + std::generic_category().message(errno));
        const pid_t parent = getpid();
        // Our handlers would swallow a request to stop that comes between fork and exec.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        process_ = fork();
        if (process_ == 0) {
            // Between fork and exec only system calls are safe. A group of its own keeps the
            // terminal's Ctrl-C from reaching it twice.
            for (int number : {SIGINT, SIGTERM, SIGUSR1}) signal(number, SIG_DFL);
            setpgid(0, 0);
            prctl(PR_SET_PDEATHSIG, SIGTERM);
            sigprocmask(SIG_SETMASK, &before, nullptr);
            if (getppid() != parent) _exit(kStopped);
            dup2(input, 0);
            dup2(output, 1);
            dup2(output, 2);
            execv(program.c_str(), argv.data());
            constexpr char kText[] = "fbt: the program that trains cannot be started\n";
            [[maybe_unused]] const ssize_t written = write(2, kText, sizeof kText - 1);
            _exit(kEnvironment);
        }
        const int error = errno;
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close(input);
        close(output);
        if (process_ < 0)
            throw Error(ErrorKind::environment,
                        "cannot start a training: " + std::generic_category().message(error));
    }
    ~Child() {
        if (!running()) return;
        stop();
        int status = 0;
        waitpid(process_, &status, 0);
    }
    Child(const Child&) = delete;

    bool running() {
        int status = 0;
        if (code_ < 0 && waitpid(process_, &status, WNOHANG) == process_) {
            code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
            // Before it has begun it has nothing to save, and our request just ends it.
            if (asked_ && code_ == 128 + SIGTERM) code_ = kStopped;
        }
        return code_ < 0;
    }
    int code() const { return code_; }
    void stop() {
        if (!asked_) kill(process_, SIGTERM);
        asked_ = true;
    }

  private:
    pid_t process_ = -1;
    int code_ = -1;
    bool asked_ = false;
};

std::string last_line(const std::string& file) {
    std::ifstream in(file);
    std::string line, last;
    while (std::getline(in, line))
        if (!line.empty()) last = line;
    return last;
}

ErrorKind kind_of(int code) {
    return code == kUsage ? ErrorKind::usage
                          : (code == kBadFile ? ErrorKind::bad_file : ErrorKind::environment);
}

// Updates done and the time they took, from the run's own rows.
void read_metrics(TrainedRun& run) {
    std::ifstream in(run.folder + "/metrics.jsonl");
    std::string line;
    while (std::getline(in, line)) {
        const json row = json::parse(line, nullptr, false);
        if (!row.is_object() || !row.contains("ms")) continue;
        run.steps = row.value("step", int64_t(0));
        run.seconds += row.value("ms", 0.0) / 1000;
    }
}

}  // namespace

void TrainedRun::add(const model::core::PassResult& pass, const std::string& suffix) {
    const auto put = [&](const char* name, double value) {
        measured[name + ("/pass_" + std::to_string(pass.pass)) + suffix] = value;
    };
    put("loss", pass.loss);
    put("accuracy", pass.accuracy);
    put("last", pass.last);
    if (!std::isnan(pass.unsettled)) put("unsettled", pass.unsettled);
    if (!std::isnan(pass.change)) put("change", pass.change);
    if (!std::isnan(pass.permuted)) put("permuted", pass.permuted);
    if (!std::isnan(pass.mean)) put("mean", pass.mean);
}

Experiment::Experiment(Console& console, const Machine& machine, const ExperimentConfig& config,
                       const StopSignals& stop)
    : console_(console),
      machine_(machine),
      config_(config),
      stop_(stop),
      context_(machine.context()),
      begun_(now()) {}

void Experiment::check_stop() const {
    if (stop_.requested()) throw Stopped{};
}

std::vector<std::string> Experiment::command_of(const Recipe& recipe, const TrainedRun& run) const {
    std::vector<std::string> c = {"train"};
    c.insert(c.end(), recipe.flags.begin(), recipe.flags.end());
    const auto add = [&](const std::string& flag, const std::string& value) {
        c.insert(c.end(), {flag, value});
    };
    if (!config_.data.empty()) add("--data", config_.data);
    add("--steps", std::to_string(steps(recipe.steps)));
    add("--seed", std::to_string(run.seed));
    add("--device", machine_.device);
    add("--dtype", machine_.dtype);
    add("--threads", "1");
    add("--out", run.folder);
    return c;
}

void Experiment::train(const std::vector<Recipe>& recipes) {
    const double start = now();
    struct Job {
        std::vector<std::string> arguments;
        size_t run;
        std::unique_ptr<Child> child;
    };
    std::vector<Job> jobs;
    // Seed by seed, so that a call that is stopped has seen all recipes.
    for (int seed = 1; seed <= config_.seeds; ++seed)
        for (const Recipe& recipe : recipes) {
            TrainedRun run;
            run.recipe = recipe.name;
            run.seed = uint64_t(seed);
            run.folder = config_.out + "/runs/" + recipe.name + "/seed_" + std::to_string(seed);
            run.measured = json::object();
            const std::vector<std::string> arguments = command_of(recipe, run);
            run.command = "fbt";
            for (const std::string& argument : arguments) run.command += " " + quoted(argument);
            std::error_code error;
            fs::create_directories(fs::path(run.folder).parent_path(), error);
            if (error)
                throw Error(ErrorKind::environment,
                            "cannot make the folder " +
                                fs::path(run.folder).parent_path().string() + ": " +
                                error.message());
            runs_.push_back(std::move(run));
            jobs.push_back({arguments, runs_.size() - 1, nullptr});
        }
    // The CPU's kernels gain less from a second thread than a second training does.
    const bool on_cpu = machine_.device == "cpu" || machine_.device == "ref";
    const size_t at_once = on_cpu ? size_t(context_.threads()) : 1;
    size_t begun = 0, done = 0;
    std::string failure;
    ErrorKind failure_kind = ErrorKind::environment;
    while (done < begun || (begun < jobs.size() && failure.empty() && !stop_.requested())) {
        while (begun - done < at_once && begun < jobs.size() && failure.empty() &&
               !stop_.requested()) {
            Job& job = jobs[begun++];
            std::vector<std::string> arguments = job.arguments;
            arguments.push_back("--resume");  // a finished one is left as it is
            job.child =
                std::make_unique<Child>(config_.program, arguments, runs_[job.run].folder + ".log");
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        for (size_t i = 0; i < begun; ++i) {
            Job& job = jobs[i];
            if (!job.child) continue;
            if (job.child->running()) {
                if (stop_.requested() || !failure.empty()) job.child->stop();
                continue;
            }
            TrainedRun& run = runs_[job.run];
            run.code = job.child->code();
            job.child.reset();
            ++done;
            const std::string last = last_line(run.folder + ".log");
            if (run.code != kDone && run.code != kDiverged) {
                // Who stops one training alone stops the experiment: half a run is not measured.
                if (failure.empty() && !(run.code == kStopped && stop_.requested())) {
                    failure =
                        run.folder + ".log: " +
                        (run.code > 128 ? "ended by signal " + std::to_string(run.code - 128) +
                                              "; its last line is: "
                                        : "") +
                        last;
                    failure_kind = kind_of(run.code);
                }
                continue;
            }
            read_metrics(run);
            console_.line(format("%zu/%zu %s, seed %llu: %lld steps, %s", done, jobs.size(),
                                 run.recipe.c_str(), static_cast<unsigned long long>(run.seed),
                                 static_cast<long long>(run.steps),
                                 short_time(run.seconds).c_str()) +
                          (run.diverged() ? console_.paint(Colour::yellow, " | " + last) : ""));
        }
    }
    training_ += now() - start;
    if (!failure.empty()) throw Error(failure_kind, failure);
    check_stop();
}

void Experiment::measure(
    const std::function<void(TrainedRun& run, const Loaded& loaded)>& measure) {
    const tensor::DType dtype = machine_.checked_dtype();
    for (TrainedRun& run : runs_) {
        check_stop();
        if (!run.diverged()) measure(run, load(run.folder, context_, dtype));
    }
}

namespace {

// The numbers of one name that a recipe's runs have, in order; and how many runs it has.
std::vector<double> numbers(const std::vector<TrainedRun>& runs, const std::string& recipe,
                            const std::string& number, int& diverged) {
    std::vector<double> out;
    for (const TrainedRun& run : runs) {
        if (run.recipe != recipe) continue;
        diverged += run.diverged();
        if (!run.measured.contains(number)) continue;
        // A number that is not finite, or is null as such numbers are in files, is worse than any.
        const json& x = run.measured[number];
        const bool finite = x.is_number() && std::isfinite(x.get<double>());
        out.push_back(finite ? x.get<double>() : std::numeric_limits<double>::infinity());
    }
    std::sort(out.begin(), out.end());
    return out;
}

double middle(const std::vector<double>& sorted) {
    const size_t n = sorted.size();
    return n % 2 == 1 ? sorted[n / 2] : (sorted[n / 2 - 1] + sorted[n / 2]) / 2;
}

}  // namespace

double Experiment::median(const std::string& recipe, const std::string& number) const {
    int diverged = 0;
    const std::vector<double> sorted = numbers(runs_, recipe, number, diverged);
    return sorted.empty() ? std::numeric_limits<double>::quiet_NaN() : middle(sorted);
}

std::string Experiment::cell(const std::string& recipe, const std::string& number,
                             const char* pattern, double factor) const {
    int diverged = 0;
    const std::vector<double> sorted = numbers(runs_, recipe, number, diverged);
    std::string text = "-";
    const auto shown = [&](double x) {
        return std::isfinite(x) ? format(pattern, factor * x) : std::string("inf");
    };
    if (!sorted.empty()) text = shown(middle(sorted));
    const std::string low = sorted.empty() ? "" : shown(sorted.front());
    const std::string high = sorted.empty() ? "" : shown(sorted.back());
    if (low != high) text += " (" + low + " to " + high + ")";
    if (diverged > 0) text += " " + std::to_string(diverged) + " diverged";
    return text;
}

void Experiment::table(const std::string& title, const Table& table) {
    console_.print("\n" + title + "\n" + table.text());
    text_ += title + "\n\n" + table.markdown() + "\n";
}

void Experiment::say(const std::string& paragraph) {
    console_.print("\n" + paragraph + "\n");
    text_ += paragraph + "\n\n";
}

json Experiment::finish() {
    const double total = now() - begun_;
    double trained = 0;
    for (const TrainedRun& run : runs_) trained += run.seconds;
    say(
        format("%s: %s in all, %s of them training; the trainings themselves took %s of one core "
               "in this call or an earlier one.",
               config_.name.c_str(), short_time(total).c_str(), short_time(training_).c_str(),
               short_time(trained).c_str()));
    json document = {{"experiment", config_.name},    {"seeds", config_.seeds},
                     {"quick", config_.quick},        {"device", machine_.device},
                     {"dtype", machine_.dtype},       {"seconds", total},
                     {"seconds_training", training_}, {"runs", json::array()}};
    for (const TrainedRun& run : runs_)
        document["runs"].push_back({{"recipe", run.recipe},
                                    {"seed", run.seed},
                                    {"command", run.command},
                                    {"folder", run.folder},
                                    {"diverged", run.diverged()},
                                    {"steps", run.steps},
                                    {"seconds", run.seconds},
                                    {"measured", run.measured}});
    const std::string stem = config_.out + "/" + config_.name;
    tensor::write_file_durably(stem + ".json", document.dump(2) + "\n");
    tensor::write_file_durably(stem + ".md", text_);
    console_.line("wrote " + stem + ".json and " + stem + ".md");
    return document;
}

Recipe text_recipe(const std::string& name, const std::string& schedule,
                   const std::vector<std::string>& more, int64_t steps) {
    Recipe recipe = {name, steps, {"--preset",         "quickstart", "--dim",         "96",
                                   "--layers",         "3",          "--heads",       "3",
                                   "--kv-heads",       "3",          "--ffn-dim",     "256",
                                   "--schedule",       schedule,     "--log-every",   "100",
                                   "--eval-every",     "50",         "--eval-passes", "3",
                                   "--eval-sequences", "128",        "--save-every",  "750",
                                   "--keep-last",      "2"}};
    recipe.flags.insert(recipe.flags.end(), more.begin(), more.end());
    return recipe;
}

std::string without_text(const std::string& recipe) {
    return recipe.starts_with("text-") ? recipe.substr(5) : recipe;
}

Recipe three_pass_recipe(model::core::Fusion fusion) {
    return text_recipe("text-3-pass-" + model::core::to_string(fusion), "1:3",
                       {"--fusion", model::core::to_string(fusion)});
}

namespace {

std::string names() {
    std::string out;
    for (const Known& known : kExperiments)
        out += (out.empty() ? "" : ", ") + std::string(known.name);
    return out;
}

struct Command {
    Settings settings;
    Machine machine;
    ExperimentConfig config;

    int run() {
        const StopSignals stop;
        settings.take_flags();
        Console console(machine.json);
        const auto known = std::find_if(std::begin(kExperiments), std::end(kExperiments),
                                        [&](const Known& k) { return config.name == k.name; });
        if (known == std::end(kExperiments))
            throw Error(
                ErrorKind::usage,
                (config.name.empty() ? std::string("an experiment's name is needed")
                                     : "unknown experiment " + tensor::in_quotes(config.name)) +
                    "; there are " + names());
        if (config.out.empty())
            throw Error(ErrorKind::usage,
                        "--out DIR is needed: the folder of trainings and tables");
        if (known->text && config.data.empty())
            throw Error(ErrorKind::usage, "the experiment " + config.name +
                                              " trains on text: --data DIR is needed (fbt data "
                                              "makes one; ./dev experiments does, of the King "
                                              "James Bible)");
        if (!known->text && !config.data.empty())
            throw Error(ErrorKind::usage,
                        "the experiment " + config.name + " generates its data: leave --data out");
        machine.checked_dtype();
        // Losses over nothing would all be 0.
        if (known->text && !Corpus(config.data, "").validation({2}, 1, 1, 2)())
            throw Error(ErrorKind::usage, "the experiment " + config.name +
                                              " measures on validation data, and " + config.data +
                                              " has none");
        if (config.quick) config.out += "/quick";  // its trainings are not the experiment's
        std::error_code error;
        fs::create_directories(config.out, error);
        if (error)
            throw Error(ErrorKind::environment,
                        "cannot make the folder " + config.out + ": " + error.message());
        check_output("--out", config.out + "/" + config.name + ".json");
        Experiment lab(console, machine, config, stop);
        try {
            known->run(lab);
            console.result(lab.finish());
        } catch (const Stopped&) {
            console.warn("stopped by a signal; the same command goes on");
            return kStopped;
        }
        return kDone;
    }
};

}  // namespace

Run add_experiment(CLI::App& app) {
    CLI::App* sub =
        app.add_subcommand("experiment", "The paper's claims, each in minutes: " + names());
    auto command = std::make_shared<Command>();
    Settings& s = command->settings;
    ExperimentConfig& config = command->config;
    std::string list = "which one";
    for (const Known& known : kExperiments)
        list += std::string("\n") + known.name + ": " + known.what;
    sub->add_option("NAME", config.name, list);
    s.add("out", &config.out, "folder of trainings and tables; finished trainings in it are kept");
    s.add("data", &config.data, "data folder (fbt data makes one), for all but state and probing");
    s.add("seeds", &config.seeds, "trainings of each recipe, with the seeds 1, 2, ...")
        .at_least(1)
        .at_most(1000);
    s.add(
        "quick", &config.quick,
        "20 steps a training and small measurements: does all of it run? The numbers say nothing");
    command->machine.declare(s);
    s.bind(*sub);
    return [command] { return command->run(); };
}

}  // namespace fbt::apps
