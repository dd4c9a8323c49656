from fleet.planning.autoscaling.planner import LOOK_MOST_S, Regret, regret_after


def test_too_few_and_too_many_are_counted_apart() -> None:
    once = regret_after(Regret(), wanted=3, needed=5, in_force=2, passed_s=5.0)
    assert once == Regret(5.0, 10.0, 0.0, 10.0)
    assert regret_after(once, wanted=3, needed=1, in_force=3, passed_s=2.0) == Regret(7.0, 10.0, 4.0, 16.0)


def test_a_time_without_a_look_counts_only_so_far() -> None:
    assert regret_after(Regret(), wanted=1, needed=1, in_force=1, passed_s=3600.0).observed_s == LOOK_MOST_S
    assert regret_after(Regret(), wanted=1, needed=1, in_force=1, passed_s=-4.0) == Regret()
