"""What the script of a resumed run sets otherwise than the script of the run that it continues."""

import torch
from torch import nn

from chainring import training


class TestSettingsOfAResumedRun:
    """Q1: torch saves the learning rate with the state, so a new one in the script must be told from a decayed one."""

    def run(self, lr, state=None, momentum=0.9):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        updater = training.StandardUpdater([torch.ones(1, 2)], optimizer, model, loss_func=lambda m, x: m(x).sum())
        if state is not None:
            updater.load_state_dict(state)
        return updater, optimizer.param_groups[0]

    def decayed(self):
        updater, group = self.run(0.1)
        updater.update()
        group["lr"] = 0.01  # as a scheduler or a shift does
        return updater.state_dict()

    def test_a_decayed_value_is_put_back_where_the_script_is_the_same(self, capsys):
        """The same script continues with the value that the saved run had reached."""
        assert self.run(0.1, self.decayed())[1]["lr"] == 0.01
        assert capsys.readouterr().out == ""

    def test_a_value_that_the_script_now_constructs_otherwise_holds_and_is_printed(self, capsys):
        """A new learning rate is a changed setting; the momentum, which is as before, comes from the saved run."""
        state = self.decayed()
        _, group = self.run(0.5, state)
        assert (group["lr"], group["momentum"]) == (0.5, 0.9)
        printed = capsys.readouterr().out
        assert "lr" in printed
        assert "0.5" in printed
        assert "0.1" in printed

    def test_a_value_is_as_constructed_before_a_scheduler_wrote_to_it(self):
        """A warm-up that starts at a tenth of the rate is no change of the rate."""
        states = []
        for lr in (0.1, 0.1):
            model = nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=lr)
            torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.1)
            updater = training.StandardUpdater([torch.ones(1, 2)], optimizer, model, loss_func=lambda m, x: m(x).sum())
            if states:
                updater.load_state_dict(states[0])
                assert optimizer.param_groups[0]["lr"] == 0.07
            optimizer.param_groups[0]["lr"] = 0.07
            states.append(updater.state_dict())
