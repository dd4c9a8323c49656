from django.apps import AppConfig


class AccountsConfig(AppConfig):
    name = "accounts"
    label = "accounts"

    def ready(self) -> None:
        """Register the receivers of logins, and the account changes that may require two-person approval."""
        import accounts.services.session  # noqa: F401 - its receivers register themselves
        from accounts.services.account_change import ACCOUNTS
        from accounts.services.approval import RELAX, fleet_action_register

        fleet_action_register(RELAX)
        fleet_action_register(ACCOUNTS)
