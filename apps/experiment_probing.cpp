#include "apps/experiment.h"
namespace fbt::apps {
void probing_experiment(Experiment& lab) { lab.say("probing"); }
}  // namespace fbt::apps
