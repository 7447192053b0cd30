// Where attention finds the keys and values of earlier positions, and leaves its own. Training
// joins a prefix of pass 1 with the span's own rows; serving writes into a paged store.
#pragma once
#include "autograd/ops.h"

namespace fbt::nn {

struct KeyValues {
    autograd::Var k, v;  // [rows, G, C]: keys after QK-norm and RoPE, values as projected
};

class KeyValueStore {
  public:
    virtual ~KeyValueStore() = default;
    // What earlier passes computed of this layer and join() will read; undefined when nothing.
    virtual KeyValues prefix(int layer) = 0;
    // The store that the span table addresses, holding all earlier positions and `own`.
    virtual KeyValues join(autograd::Tape& tape, int layer, const KeyValues& prefix,
                           const KeyValues& own) = 0;
    // Called once a layer with the span's own rows, for those who need them later.
    virtual void keep(int layer, const KeyValues& own) = 0;
};

}  // namespace fbt::nn
