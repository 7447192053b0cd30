// Pages: who holds them, who may write them, and how plain ones are found again.
#include "model/core/paged_store.h"

#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using kernels::kKeyBlock;

class Pages : public testing::Test {
  protected:
    Pages() : context("cpu", 1), model(context, small_config(), DType::f32) {
        randomise(model, false);
    }
    // Runs these positions of a sequence, plain.
    void run(const std::shared_ptr<PagedStore>& store, PagedStore::Pages& pages,
             const std::vector<int32_t>& tokens, int first) {
        const int end = int(tokens.size());
        store->reserve(pages, first, end);
        auto spans = std::make_shared<SpanBatch>();
        PagedStore::add_span(*spans, pages, first, end - first);
        advance(model, store, spans, {tokens.begin() + first, tokens.end()});
    }
    std::vector<double> contents(const PagedStore& store, const PagedStore::Pages& pages, int end) {
        std::vector<double> all = store.read_states(pages, 0, end).to_double();
        for (int l = 0; l < model.config().layers; ++l)
            for (const Tensor& t :
                 {store.read_keys(pages, l, 0, end), store.read_values(pages, l, 0, end)}) {
                const std::vector<double> x = t.to_double();
                all.insert(all.end(), x.begin(), x.end());
            }
        return all;
    }
    Context context;
    Model model;
};

TEST_F(Pages, AreSharedUntilSomebodyWrites) {
    const auto store = std::make_shared<PagedStore>(model);
    std::vector<int32_t> tokens = random_tokens(100, 23, 1);
    PagedStore::Pages a;
    run(store, a, tokens, 0);
    ASSERT_EQ(a.size(), 2u);
    PagedStore::Pages b = store->fork(a, 80);
    EXPECT_EQ(b, a);
    EXPECT_EQ(store->held(), 2);
    EXPECT_EQ(store->needed(b, 80, 90), 1) << "the page that both hold";
    EXPECT_EQ(store->needed(b, 80, 130), 2);
    const std::vector<double> before = contents(*store, a, 100);
    std::vector<int32_t> other = tokens;
    other.resize(80);
    for (int32_t t : random_tokens(12, 23, 2)) other.push_back(t);
    run(store, b, other, 80);
    EXPECT_EQ(b[0], a[0]);
    EXPECT_NE(b[1], a[1]);
    EXPECT_EQ(store->held(), 3);
    EXPECT_EQ(store->needed(a, 80, 90), 0) << "now its own";
    EXPECT_TRUE(same_bits(contents(*store, a, 100), before));
    PagedStore::Pages c;
    run(store, c, other, 0);
    EXPECT_TRUE(same_bits(contents(*store, b, 92), contents(*store, c, 92)));
    store->release(a);
    store->release(b);
    EXPECT_EQ(store->held(), 2);
    store->release(c);
    EXPECT_EQ(store->held(), 0);
}

TEST_F(Pages, PlainOnesAreFoundByTheirTokens) {
    const auto store = std::make_shared<PagedStore>(model, 6);
    const std::vector<int32_t> tokens = random_tokens(3 * kKeyBlock + 5, 23, 1);
    PagedStore::Pages a;
    run(store, a, tokens, 0);
    store->publish(a, tokens, 0, int(tokens.size()));
    const std::vector<double> bits = contents(*store, a, 3 * kKeyBlock);
    const PagedStore::Pages held = a;
    store->release(a);
    EXPECT_EQ(store->held(), 0);
    EXPECT_EQ(store->available(), 6) << "what can be found is there to be taken";

    PagedStore::Pages b = store->find(tokens, int(tokens.size()));
    EXPECT_EQ(b, PagedStore::Pages(held.begin(), held.begin() + 3)) << "whole pages only";
    EXPECT_TRUE(same_bits(contents(*store, b, 3 * kKeyBlock), bits));
    EXPECT_EQ(store->available(), 3);
    PagedStore::Pages none = store->find(tokens, kKeyBlock - 1);
    EXPECT_TRUE(none.empty());
    // One other token at the front, and nothing is the same; one further on, what is before it is.
    std::vector<int32_t> other = tokens;
    other[0] = (other[0] + 1) % 23;
    EXPECT_TRUE(store->find(other, 3 * kKeyBlock).empty());
    other = tokens;
    other[2 * kKeyBlock] = (other[2 * kKeyBlock] + 1) % 23;
    PagedStore::Pages part = store->find(other, 3 * kKeyBlock);
    EXPECT_EQ(part.size(), 2u);
    store->release(part);
    store->release(b);

    // New pages push out the end of the prefix first, and then it is not found any more.
    PagedStore::Pages more;
    run(store, more, random_tokens(4 * kKeyBlock, 23, 9), 0);
    b = store->find(tokens, 3 * kKeyBlock);
    EXPECT_EQ(b, PagedStore::Pages(held.begin(), held.begin() + 2));
    EXPECT_EQ(store->available(), 0);
    EXPECT_THROW(store->reserve(more, 4 * kKeyBlock, 4 * kKeyBlock + 1), tensor::Error);
    store->release(b);
    store->release(more);
    EXPECT_EQ(store->held(), 0);
}

// Two sequences that compute the same prefix at the same time: one of them is found, and what
// either adds to it is.
TEST_F(Pages, TwinsArePublishedOnce) {
    const auto store = std::make_shared<PagedStore>(model);
    const std::vector<int32_t> tokens = random_tokens(2 * kKeyBlock, 23, 1);
    PagedStore::Pages a, b;
    run(store, a, tokens, 0);
    run(store, b, tokens, 0);
    store->publish(a, tokens, 0, kKeyBlock);
    store->publish(b, tokens, 0, 2 * kKeyBlock);
    PagedStore::Pages found = store->find(tokens, 2 * kKeyBlock);
    EXPECT_EQ(found, (PagedStore::Pages{a[0], b[1]}));
    for (PagedStore::Pages* pages : {&a, &b, &found}) store->release(*pages);
    EXPECT_EQ(store->held(), 0);
    found = store->find(tokens, 2 * kKeyBlock);
    EXPECT_EQ(found.size(), 2u);
}

}  // namespace
}  // namespace fbt::tests
