// Checkpoints: what a damaged one says, and what survives a crashed save.
#include "model/core/checkpoint.h"

#include <filesystem>
#include <fstream>

#include "tensor/file.h"
#include "tensor/safetensors.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using namespace model::core;
using tensor::Error;

class Checkpoint : public testing::Test {
  protected:
    Checkpoint()
        : run(fs::temp_directory_path() / ("fbt_checkpoint_" + std::to_string(::getpid()))),
          context("cpu", 1),
          model(context, small_config(), DType::f32) {
        fs::remove_all(run);
        randomise(model, true);
        optimizer = std::make_unique<nn::AdamW>(model.parameters(), nn::AdamWConfig());
    }
    ~Checkpoint() override { fs::remove_all(run); }
    void save(int64_t step, int keep = 3) {
        save_checkpoint(run, model, *optimizer, {step, 1, 2, 3, 0},
                        {{"model", to_json(model.config())}, {"train", nlohmann::json::object()}},
                        keep);
    }
    // Rewrites model.safetensors with one tensor changed by `edit`.
    template <class F>
    void edit(F&& edit) {
        const fs::path path = fs::path(find_checkpoint(run)) / "model.safetensors";
        std::vector<tensor::SafetensorsWriter::Item> items;
        std::map<std::string, std::vector<float>> values;
        {
            const auto file = tensor::SafetensorsFile::open(path);
            for (const auto& [name, e] : file.entries()) {
                items.push_back({name, e.dtype, e.shape});
                values[name] = file.read<float>(name);
            }
        }
        edit(items, values);
        tensor::SafetensorsWriter writer(path, items);
        for (const auto& item : writer.items()) writer.write(item.name, values[item.name]);
        writer.finish();
    }
    std::string error() {
        Model other(context, small_config(), DType::f32);
        try {
            load_parameters(find_checkpoint(run), other, false);
        } catch (const Error& e) {
            EXPECT_EQ(e.kind(), tensor::ErrorKind::bad_file);
            return e.what();
        }
        return "";
    }

    fs::path run;
    Context context;
    Model model;
    std::unique_ptr<nn::AdamW> optimizer;
};

TEST_F(Checkpoint, RoundTrip) {
    optimizer->states()[3].steps = 17;
    save(42);
    const std::string path = find_checkpoint(run);
    EXPECT_EQ(fs::path(path).filename(), "step_00000042");
    EXPECT_EQ(find_checkpoint(path), path);
    Model other(context, config_from_json(load_config(path)["model"]), DType::f32);
    load_parameters(path, other, true);
    EXPECT_EQ(weights_hash(other), weights_hash(model));
    nn::AdamW moments(other.parameters(), {});
    load_optimizer(path, other, moments);
    EXPECT_EQ(moments.states()[3].steps, 17);
    const TrainingState state = load_state(path);
    EXPECT_EQ(state.step, 42);
    EXPECT_EQ(state.epoch, 1);
    EXPECT_EQ(state.index, 2);
    EXPECT_EQ(state.seed, 3u);
}

TEST_F(Checkpoint, KeepsTheNewestAndClearsLeftovers) {
    for (int64_t step : {1, 2, 3, 4}) save(step, 2);
    EXPECT_FALSE(fs::exists(run / "step_00000002"));
    EXPECT_TRUE(fs::exists(run / "step_00000003"));
    fs::create_directories(run / ".step_00000009.tmp");
    fs::create_directories(run / "step_00000010");  // incomplete: does not count
    EXPECT_EQ(fs::path(find_checkpoint(run)).filename(), "step_00000004");
    save(5, 2);
    EXPECT_FALSE(fs::exists(run / ".step_00000009.tmp"));
    EXPECT_EQ(fs::path(find_checkpoint(run)).filename(), "step_00000005");
}

TEST_F(Checkpoint, NothingThereIsAnError) {
    EXPECT_FALSE(newest_checkpoint(run).has_value());
    EXPECT_THROW(find_checkpoint(run), Error);
    fs::create_directories(run);
    EXPECT_THROW(find_checkpoint(run), Error);
}

TEST_F(Checkpoint, MissingTensor) {
    save(1);
    edit([](auto& items, auto&) {
        std::erase_if(items, [](auto& i) { return i.name == "final_norm.gain"; });
    });
    EXPECT_NE(error().find("lacks tensor final_norm.gain"), std::string::npos) << error();
}

TEST_F(Checkpoint, ExtraTensor) {
    save(1);
    edit([](auto& items, auto& values) {
        items.push_back({"surprise", tensor::DType::f32, {1}});
        values["surprise"] = {1};
    });
    EXPECT_NE(error().find("holds tensor surprise"), std::string::npos) << error();
}

TEST_F(Checkpoint, MisshapenTensor) {
    save(1);
    edit([](auto& items, auto&) {
        for (auto& i : items)
            if (i.name == "embed.weight") i.shape = {i.shape[1], i.shape[0]};
    });
    EXPECT_NE(error().find("embed.weight is [24,23], expected [23,24]"), std::string::npos)
        << error();
}

TEST_F(Checkpoint, NanTensor) {
    save(1);
    edit([](auto&, auto& values) { values["input_norm.gain"][5] = NAN; });
    EXPECT_NE(error().find("input_norm.gain holds a value that is not finite, at element 5"),
              std::string::npos)
        << error();
}

TEST_F(Checkpoint, IntegersAreNoWeights) {
    save(1);
    const std::string path = find_checkpoint(run) + "/model.safetensors";
    std::string bytes = tensor::read_file(path);
    const size_t at = bytes.find("F32", bytes.find("final_norm.gain"));
    ASSERT_NE(at, std::string::npos);
    bytes.replace(at, 3, "I32");
    std::ofstream(path, std::ios::binary) << bytes;
    EXPECT_NE(error().find("final_norm.gain is i32"), std::string::npos) << error();
}

TEST_F(Checkpoint, ABrokenModelIsNotSaved) {
    save(1);
    model.parameters().at("final_norm.gain").weight().value.data<float>()[0] = INFINITY;
    try {
        save(2, 1);
        ADD_FAILURE() << "was saved";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::diverged);
    }
    EXPECT_EQ(fs::path(find_checkpoint(run)).filename(), "step_00000001");
}

TEST_F(Checkpoint, StateMustBeWhatItsFolderSays) {
    save(3);
    const std::string path = find_checkpoint(run);
    const auto good = nlohmann::json::parse(tensor::read_file(path + "/state.json"));
    for (const auto& [key, value] :
         std::vector<std::pair<std::string, nlohmann::json>>{{"step", 2},
                                                             {"step", -3},
                                                             {"step", 3.5},
                                                             {"step", 1e300},
                                                             {"skipped", -1},
                                                             {"epoch", "x"},
                                                             {"index", nullptr},
                                                             {"seed", -1}}) {
        nlohmann::json state = good;
        state[key] = value;
        std::ofstream(path + "/state.json") << state;
        EXPECT_THROW(load_state(path), Error) << key << " " << value;
    }
}

TEST_F(Checkpoint, PathsAreNormalised) {
    save(3);
    EXPECT_EQ(find_checkpoint((run / "step_00000003/").string()), (run / "step_00000003").string());
}

TEST_F(Checkpoint, DamagedJson) {
    save(1);
    const std::string path = find_checkpoint(run);
    std::ofstream(path + "/state.json") << "{";
    EXPECT_THROW(load_state(path), Error);
    std::ofstream(path + "/state.json") << R"({"version": "other"})";
    EXPECT_THROW(load_state(path), Error);
    std::ofstream(path + "/config.json") << "{}";
    EXPECT_THROW(load_config(path), Error);
}

}  // namespace
}  // namespace fbt::tests
