// How a step's tokens are shared out to experts.
#pragma once

#include <vector>

#include <stdint.h>

namespace plait {

// Some units (groups of outputs, or panels) of one expert for some of its rows.
struct ExpertItem {
  int32_t expert;
  int32_t row0, row1;    // of the expert's rows
  int32_t unit0, unit1;
};

// A *choice* is one of a token's k experts: choice j of token t has the number t * k + j. A *row* is a choice in the
// order of the experts, and among those of one expert in the order of the choices. Everything is reused from step to
// step: memory grows to what the largest step needs and stays.
struct ExpertWork {
  std::vector<int32_t> start;   // [experts + 1] first row of each expert
  std::vector<int32_t> choice;  // [rows] the choice that is this row
  std::vector<int32_t> row;     // [choices] the row of a choice
  std::vector<int64_t> apart;   // [experts] tokens between neighbouring rows, 0 where these differ
  std::vector<ExpertItem> gated, down;

  int64_t bytes() const {
    return int64_t((start.capacity() + choice.capacity() + row.capacity()) * sizeof(int32_t) +
                   apart.capacity() * sizeof(int64_t) + (gated.capacity() + down.capacity()) * sizeof(ExpertItem));
  }
};

}  // namespace plait
